"""The record of behaviour: what the scheduler and real engines do, written down before a change that should change
nothing, and compared after it.

`scheduler.json` follows from counts alone and is the same on every machine; `engines.json` depends on the processor's
arithmetic and names the processor.
"""
