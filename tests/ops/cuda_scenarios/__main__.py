import sys

from tests.ops.cuda_scenarios import main

if __name__ == "__main__":  # not in a process that a scenario spawns
    sys.exit(main())
