"""The version of the package; its metadata take it from here."""

__version__ = "0.2.0"
