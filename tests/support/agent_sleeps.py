"""An environment's module that takes too long to import."""

import time

time.sleep(3600)
