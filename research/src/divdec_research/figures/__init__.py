"""The paper's figures from result folders."""
