"""`python -m ds_memo.cli`, for launchers that start modules."""

import sys

from ds_memo.cli.main import main

sys.exit(main())
