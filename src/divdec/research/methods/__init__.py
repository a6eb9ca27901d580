"""Every unlearning method on the same work: trained or wrapped, measured on TOFU's suite, and put into one table."""
