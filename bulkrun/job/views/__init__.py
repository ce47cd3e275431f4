"""What a finished or running run looks like from outside: status, errors, verification, listing."""
