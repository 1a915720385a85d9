"""Ways to bring the learner's weights into SGLang servers."""
