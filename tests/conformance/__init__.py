"""DeepSpeed's own tests, pointed at ds_memo. They run where DEEPSPEED_TESTS=/path/to/DeepSpeed/tests names a checkout."""
