"""The commands, one file for what is done to the same thing. They import only click until one of them is called."""
