from kvbus_router.cli import main

raise SystemExit(main())
