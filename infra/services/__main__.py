"""``python -m infra.services up|deploy|undeploy|down|status``."""

from infra.services.servers import main

if __name__ == "__main__":
    main()
