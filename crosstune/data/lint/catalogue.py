"""All faults by code, in the order in which they are shown."""

from __future__ import annotations

from crosstune.data.lint.fault import Fault
from crosstune.data.lint.faults_file import FILE_FAULTS
from crosstune.data.lint.faults_folds import FOLD_FAULTS
from crosstune.data.lint.faults_rows import ROW_FAULTS
from crosstune.data.lint.faults_settings import SETTING_FAULTS
from crosstune.data.lint.faults_template import TEMPLATE_FAULTS
from crosstune.data.lint.faults_tokens import TOKEN_FAULTS

SECTIONS: dict[str, tuple[Fault, ...]] = {
    "File": FILE_FAULTS,
    "Rows": ROW_FAULTS,
    "Tokenizer and template": TOKEN_FAULTS + TEMPLATE_FAULTS,
    "Folds": FOLD_FAULTS,
    "Recipe": SETTING_FAULTS,
}
FAULTS: dict[str, Fault] = {fault.code: fault for faults in SECTIONS.values() for fault in faults}
