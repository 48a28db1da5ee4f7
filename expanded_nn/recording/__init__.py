"""Which forwards belong together, whose gradient a row is, and how long rows are held; no mathematics of layers.

`docs/lifetime.md` follows a backward through these files, and says where each decision is made. Rows are *dropped*; a
parameter that is gone is *forgotten*, with its rows; a recorder that modules leave is *closed*.
"""
