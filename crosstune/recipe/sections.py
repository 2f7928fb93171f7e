"""The options of a recipe, section by section. Each is described once, here: `--help`, docs and errors read it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator

Auto = Literal["auto"]


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    return value


Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]
Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
CountOrNone = Annotated[int, BeforeValidator(_no_bool), Field(ge=0)]


def _interval(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"\d+(\.\d+)?(s|min|h)|never", value):
        raise ValueError("steps (a whole number), a time such as 90s, 10min or 1h, or never is expected")
    return value


def _function_names(value: Any) -> Any:
    """Functions among the metrics by the name under which they can be found again."""
    if not isinstance(value, list | tuple):
        return value
    return [_function_name(one) if callable(one) else one for one in value]


def _function_name(function: Any) -> str:
    if "<" in function.__qualname__:
        raise ValueError(f"the function {function.__qualname__} can't be found again; put it at the top of a module")
    return f"{function.__module__}:{function.__qualname__}"


class Section(BaseModel):
    """Frozen, and nothing that it doesn't know gets in."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class Model(Section):
    """The frozen base model and its tokenizer."""

    name: str = Field(description="Hub id, local folder, or .gguf file of the base model.")
    quantization: Literal["none", "int8", "nf4"] = Field("none", description="How the frozen weights are held.")
    double_quant: bool = Field(True, description="NF4 only: quantise the quantisation statistics too.")
    revision: str | None = Field(None, description="Branch, tag or commit on the hub.")
    tokenizer: str | None = Field(None, description="Hub id or folder of the tokenizer, where it isn't the model's.")
    chat_template: str | None = Field(
        None, description="File with a Jinja chat template that replaces the tokenizer's."
    )
    pad_token: str | None = Field(
        None, description="Padding token. Default: chosen so that it never equals a stop token."
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the model. Off unless asked for."
    )


class Data(Section):
    """The rows, their shape, and how much of each is used."""

    path: str = Field(description="JSONL, JSON, CSV or Parquet file, or the hub id of a data set.")
    shape: Literal["auto", "text", "prompt", "messages", "alpaca", "sharegpt"] = Field(
        "auto", description="Shape of a row. auto: told from the file, and said."
    )
    split: str = Field("train", description="Split of a hub data set.")
    text: str = Field("text", description="Column that holds the text, for shape text.")
    prompt: str = Field("prompt", description="Column that holds the prompt, for shape prompt.")
    completion: str = Field("completion", description="Column that holds the completion, for shape prompt.")
    max_tokens: Int | None = Field(
        None, ge=2, description="Rows are cut to this many tokens. Default: the model's own limit, said at the start."
    )
    packing: bool = Field(False, description="Put several rows into one sequence; they never see one another.")
    learn: Literal["auto", "assistant", "all"] = Field(
        "auto",
        description="Tokens to learn from. auto: assistant turns of conversations and completions; all of a text.",
    )
    answer_after: str | None = Field(
        None,
        description="Shape text only: learn what follows the last occurrence of this string, and nothing before it.",
    )
    special_text: Literal["refuse", "keep"] = Field(
        "refuse", description="Text that spells a control token: refuse the row, or keep it as ordinary characters."
    )
    exclude: str | None = Field(
        None, description="CSV file with a column 'row': these rows are left out. suspects.csv is such a file."
    )
    skip_bad_rows: bool = Field(False, description="Leave rows with errors out (and list them) in place of refusing.")


STRATIFIED_KINDS = ("stratified", "stratified-group", "repeated-stratified")
GROUP_KINDS = ("group", "stratified-group", "leave-one-group-out")


class Folds(Section):
    """How rows are split into training and held-out rows."""

    kind: Literal[
        "kfold", "stratified", "group", "stratified-group", "time-series", "shuffle", "leave-one-out",
        "leave-one-group-out", "repeated-kfold", "repeated-stratified", "column",
    ] = Field("kfold", description="scikit-learn's splitter by name, or a column with the fold.")  # fmt: skip
    k: Int = Field(5, ge=2, description="Number of folds (of splits, for shuffle).")
    splitter: str | None = Field(
        None, description="A scikit-learn splitter passed from Python, in words; it takes the place of kind."
    )
    by: str | None = Field(None, description="Column with the class (stratified), the time, or the fold (column).")
    group: str | None = Field(None, description="Column whose equal values must stay on one side of a fold.")
    seed: Int = Field(0, description="Seed of the split.")
    repeats: Int = Field(2, ge=1, description="Repetitions, for the repeated kinds.")
    test_share: Float = Field(0.2, gt=0, lt=1, description="Held-out share, for shuffle.")
    duplicates: Literal["together", "first", "ignore"] = Field(
        "together", description="Equal rows: keep them on one side, keep only the first, or take no notice."
    )
    allow_small_classes: bool = Field(False, description="Accept classes with fewer rows than folds.")
    outer: CountOrNone = Field(
        0, description="Outer folds of a nested cross-validation: the sweep within each, its winner scored outside."
    )

    @model_validator(mode="after")
    def _has_its_columns(self) -> Folds:
        for option, purpose, kinds in (("by", "the class", STRATIFIED_KINDS), ("by", "the fold", ("column",)),
                                       ("group", "the group", GROUP_KINDS)):  # fmt: skip
            if self.kind in kinds and self.__dict__[option] is None:
                raise ValueError(f"kind {self.kind} needs folds.{option}, the column with {purpose}")
        return self


class Lora(Section):
    """One adapter's settings."""

    rank: Int = Field(16, ge=1, description="Rank of the two adapter matrices.")
    alpha: Float = Field(32, gt=0, description="Scale: the adapter's output is multiplied by alpha / rank.")
    dropout: Float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    targets: str | tuple[str, ...] = Field(
        "all-linear", description="Linear layers to adapt: names, or all-linear (all but the output head)."
    )
    rslora: bool = Field(False, description="Scale by alpha / sqrt(rank) (rank-stabilised LoRA, arXiv:2312.03732).")


class Stop(Section):
    """Early stopping, measured on a share of the lane's own training rows unless asked otherwise by name."""

    share: Float = Field(0.1, gt=0, lt=1, description="Share of the training rows kept aside to decide when to stop.")
    patience: Int = Field(2, ge=1, description="Evaluations without improvement before the lane stops.")
    on: Literal["own_rows", "held_out"] = Field(
        "own_rows", description="held_out decides on the rows that are scored: every score is then marked optimistic."
    )


class Train(Section):
    """How a lane is trained."""

    epochs: Float = Field(3, gt=0, description="Passes over the lane's training rows; fractions are allowed.")
    max_steps: Int | None = Field(None, ge=1, description="Optimizer steps, in place of epochs.")
    learning_rate: Float = Field(2e-4, ge=0, description="Peak learning rate of AdamW.")
    batch_size: Int = Field(8, ge=1, description="Rows (packed sequences, with packing) a lane and optimizer step.")
    schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="Learning rate after the warm-up.")
    warmup: Float = Field(0.03, ge=0, description="Warm-up: a share of the steps if below 1, else a number of steps.")
    weight_decay: Float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    max_grad_norm: Float = Field(1.0, gt=0, description="Each lane's gradient is clipped to this norm.")
    beta1: Float = Field(0.9, ge=0, lt=1, description="AdamW's first decay rate.")
    beta2: Float = Field(0.999, ge=0, lt=1, description="AdamW's second decay rate.")
    epsilon: Float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    seed: Int = Field(0, description="Seed of initial adapters, row order and dropout; each fold derives its own.")
    share: Float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of the lane's training rows that is used; a smaller share is part of a larger.",
    )
    stop: Stop | None = Field(None, description="Early stopping. Off unless given.")
    keep: Literal["last", "best"] = Field(
        "last", description="Which step's adapter is kept. best is measured where train.stop says."
    )
    checkpoint_every: Annotated[Count | str, BeforeValidator(_interval)] = Field(
        "2min", description="Keep the state of unfinished lanes every so many steps, or every 90s, 10min, 1h; or never."
    )

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if self.max_steps is not None and self.epochs != Train.model_fields["epochs"].default:
            raise ValueError(
                f"epochs {self.epochs:g} and max_steps {self.max_steps} both say how long to train; give one"
            )
        return self

    @model_validator(mode="after")
    def _best_needs_stop(self) -> Train:
        if self.keep == "best" and self.stop is None:
            raise ValueError(
                "keep: best needs train.stop, which says on which rows 'best' is measured "
                "(train.stop.on: own_rows, or held_out for an optimistic score)"
            )
        return self


class Evaluate(Section):
    """What is measured on held-out rows, and how often."""

    metrics: Annotated[tuple[str, ...], BeforeValidator(_function_names)] = Field(
        ("loss", "token_accuracy"), description="Metrics on rows never seen: names, or file.py:function."
    )
    every: Literal["epoch"] | Count = Field("epoch", description="Evaluate at every epoch, or every so many steps.")
    labels: tuple[str, ...] | str | None = Field(
        None, description="Labels of choice metrics: a list, or the column with the right one. Default: all answers."
    )
    by_token: bool = Field(False, description="Divide a label's log-likelihood by its number of tokens.")
    max_new_tokens: Count | None = Field(
        None, description="Longest generated answer. Default: a quarter more than the longest answer of the data."
    )
    temperature: Float = Field(0.0, ge=0, description="Of generated answers; 0 takes the likeliest token.")
    top_p: Float = Field(1.0, gt=0, le=1, description="Draw from the likeliest tokens that hold this much probability.")
    seed: Int = Field(0, description="Seed of draws and of few-shot examples.")
    shots: CountOrNone = Field(
        0, description="Training-side examples before each prompt, for a few-shot baseline; 0: no such baseline."
    )


class Device(Section):
    """Where and how wide it runs. Nothing here changes a result by more than rounding, precision aside."""

    kind: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="Device type.")
    gpus: Auto | tuple[CountOrNone, ...] = Field(
        "auto",
        description="GPU to run on, by its number, such as [1]; several for layers or ray. auto: the one with most "
        "free memory, or all.",
    )
    layers: Literal["one", "auto", "balanced", "sequential"] = Field(
        "one",
        description="Where the base's layers lie: on one GPU, spread evenly over several (balanced), or filling one "
        "after another (sequential). auto: on one if the plan fits there, else balanced.",
    )
    offload: Literal["none", "cpu"] = Field(
        "none", description="cpu: layers for which no GPU has room are kept and computed on the CPU, which is slow."
    )
    lanes: Auto | Count = Field("auto", description="Lanes a wave. auto: as many as fit.")
    micro_batch: Auto | Count = Field("auto", description="Rows a lane and pass; accumulation follows from it.")
    checkpointing: Auto | Literal["none", "all"] | CountOrNone = Field(
        "auto", description="Decoder layers whose activations are recomputed: none, all, or a number."
    )
    graphs: Auto | StrictBool = Field(
        "auto",
        description="Record short passes as CUDA graphs, which take less time to launch. auto: where 15% of the memory "
        "stays free.",
    )
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field("auto", description="Compute type of the frozen base.")
    ray: str | None = Field(
        None, description="Spread waves over a Ray cluster: auto (this machine's own), or its address."
    )
    workers: Auto | Count = Field("auto", description="Ray only: workers, each with its own base. auto: one a GPU.")
    retries: CountOrNone = Field(3, description="Ray only: times that a lost wave is handed out again before it fails.")


class Lint(Section):
    """Faults found before training."""

    allow: tuple[str, ...] = Field((), description="Codes of errors to train in spite of; written into the journal.")
