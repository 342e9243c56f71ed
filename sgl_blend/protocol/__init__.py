"""What a request may say, the same in the tokenizer's and the scheduler's process."""
