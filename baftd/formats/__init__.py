"""File formats of frameworks and descriptions written by hand, read and written without the framework. Pure: text and
bytes in, values out."""
