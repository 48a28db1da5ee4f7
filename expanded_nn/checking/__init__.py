"""The parts of `check`: runs of copies, the values between modules, the loop over the samples, the report."""
