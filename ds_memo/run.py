"""`python -m ds_memo.run SCRIPT`: see ds_memo/cli/run_script.py."""

from ds_memo.cli.run_script import main

if __name__ == "__main__":
    main()
