"""The recurrences behind `rnn.py`: their equations, their loops over time, where the steps of a sequence lie."""
