.PHONY: format check test docs

format:
	ruff format .
	ruff check --fix .

check:
	ruff format --check .
	ruff check .
	pyright

test:
	pytest -n auto

docs:
	mkdocs build --strict
