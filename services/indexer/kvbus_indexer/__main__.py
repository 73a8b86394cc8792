from kvbus_indexer.cli import main

raise SystemExit(main())
