from kvbus_frontend.cli import main

raise SystemExit(main())
