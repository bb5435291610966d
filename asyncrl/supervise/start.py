"""`python -P -m asyncrl.supervise.start MODULE ARGUMENTS`: one of our modules as the main program
of a process.

With -P nothing of the working directory comes before what is installed; `append_working_directory`
puts it behind,
for reward functions.  `importing.command` writes such command lines.
"""

from __future__ import annotations

import runpy
import sys

from asyncrl.contract import importing

if __name__ == "__main__":
    importing.append_working_directory()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
