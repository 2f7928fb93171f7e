"""The 5-fold job side by side on one GPU: crosstune, loops of other trainers, the arithmetic floor.

`__main__` starts one process a contestant and prints the ratios; `job` says what is trained, in which order and from
which initial adapters; `ours` calls the public API; `peer` is the loop over folds that the others share; `trl_loop`,
`peft_loop` and `unsloth_loop` are what differs between them; `summary` makes ratios of the lines.
"""
