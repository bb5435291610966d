"""Run a module as main: `python -P -m asyncrl.supervise.start MODULE ARGUMENTS`.

With -P, files in the working directory cannot shadow installed packages; `append_working_directory`
appends it to sys.path for reward functions.  `importing.make_command` builds these command lines.
"""

import runpy
import sys

from asyncrl.contract import importing

if __name__ == "__main__":
    importing.append_working_directory()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
