"""The only folder that knows SGLang's names."""
