"""The commands: an option, one library call, a table or JSON. Imports nothing heavy until it must."""
