.PHONY: format check test docs

format:
	ruff format .
	ruff check --fix .

check:
	ruff format --check .
	ruff check .
	pyright

test:
	pytest

docs:
	mkdocs build --strict
