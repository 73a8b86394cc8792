from kvbus_kvbm.cli import main

raise SystemExit(main())
