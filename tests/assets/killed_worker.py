"""Stands before the worker's command, as a launcher does, and lets it die at a point, run and all.

python tests/assets/killed_worker.py POINT -m resources.worker STAGE SPEC.json
"""

import os
import sys

sys.path.insert(0, os.getcwd())

from resources import worker
from tests.assets.kills import TRAINING, arm, die_with_the_run

if __name__ == "__main__":
    point = TRAINING[sys.argv[1]]
    del sys.argv[1:4]  # POINT -m resources.worker
    arm(point, die_with_the_run)
    worker.main()
