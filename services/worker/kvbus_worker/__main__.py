from kvbus_worker.cli import main

raise SystemExit(main())
