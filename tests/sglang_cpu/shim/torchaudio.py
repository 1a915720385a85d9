"""SGLang imports torchaudio whenever it reads a sound, and uses it only to resample one. It does not load beside a CPU
build of torch."""
