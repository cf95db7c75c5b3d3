"""Config keys by the folder that reads them. Declarations only: no file here reads a config or imports torch."""
