"""`python -m strop`."""

from strop.cli import main

raise SystemExit(main())
