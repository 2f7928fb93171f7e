"""The memory plan against a GPU.

`__main__` has the commands; `grid` the settings; `base` their random weights; `predict` what closed form and rehearsal
say of a cell; `readings` what the GPU says; `edges` whether plans that just fit do run; `table` prints what was missed.
"""
