"""A checkpoint on disk: headers, which files hold which tensor, reading them in order and ahead."""
