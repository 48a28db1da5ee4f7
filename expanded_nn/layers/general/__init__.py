"""The general rule: any other module with parameters of its own, on the whole batch or sample by sample."""
