"""Training of DeepSeek-V4.1 with Lightning: task, data, callbacks, command line."""
