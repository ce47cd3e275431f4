"""Where bytes lie and how they stay: names, fsyncs, folders, object stores. Knows no rows."""
