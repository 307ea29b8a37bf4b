"""``python -m infra.services up|deploy|down|status``."""

from infra.services.servers import main

if __name__ == "__main__":
    main()
