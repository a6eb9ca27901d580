"""The playground: a page on which one sees what steering does, token by token."""
