"""A language model as judge, behind an OpenAI-compatible endpoint: of one episode, or of the episodes of a group."""
