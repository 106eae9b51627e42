"""Hostile code, run in bubblewrap and judged outside.

    grade.py       samples in, verdicts out
    truth.py       what the reference solutions return, kept on disk
    values.py      is a returned value the expected one?  oracles.py: the tasks with several answers
    process.py     our side of a warm worker
    bubblewrap.py  the walls around it
    worker.py      the program inside: a fresh child a run
    codec.py       plain data as text, on both sides of the wall

The program and its inputs go in, plain data comes out, and expected values never enter. A hostile
program can return what it likes; it cannot say whether that was right.
"""
