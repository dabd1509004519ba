"""A router's side, on nothing but pyzmq and msgspec: prints after each command which keys the stream says are cached.

Commands on standard input: `wait N` until batch N − 1 was seen, then print one line of JSON; `end`.
"""

import json
import sys

import msgspec
import zmq


def main(endpoint: str, replay: str) -> None:
    context = zmq.Context()
    live = context.socket(zmq.SUB)
    live.set_hwm(0)
    live.connect(endpoint)
    live.subscribe(b"kv")
    asking = context.socket(zmq.DEALER)
    asking.connect(replay)
    keys: dict[int, set[bytes]] = {}
    due, replayed = 0, 0

    def apply(sequence: int, payload: bytes) -> None:
        nonlocal due
        if sequence != due:
            return
        due += 1
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                keys.clear()
                continue
            group = keys.setdefault(event["group_idx"], set())
            hashes = event["block_hashes"]
            if event["type"] == "BlockStored":
                # Keys that a restarted engine took over from a snapshot come without tokens.
                if event["token_ids"] and len(hashes) * event["block_size"] != len(event["token_ids"]):
                    raise SystemExit("token ids do not fit the hashes")
                group.update(hashes)
            else:
                group.difference_update(hashes)

    def catch_up() -> None:
        """Ask for everything from the batch that is due."""
        nonlocal replayed
        asking.send_multipart((b"", due.to_bytes(8, "big", signed=True)))
        while True:
            _, number, payload = asking.recv_multipart()
            sequence = int.from_bytes(number, "big", signed=True)
            if sequence < 0:
                return
            replayed += sequence == due
            apply(sequence, payload)

    catch_up()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        if line.strip() == "end":
            return
        wanted = int(line.split()[1])
        while due < wanted:
            if live.poll(100):
                _topic, number, payload = live.recv_multipart()
                sequence = int.from_bytes(number, "big", signed=True)
                if sequence > due:
                    catch_up()
                apply(sequence, payload)
            else:
                catch_up()
        held = sorted((group, digest.hex()) for group, digests in keys.items() for digest in digests)
        sys.stdout.write(json.dumps({"due": due, "replayed": replayed, "keys": held}) + "\n")
        sys.stdout.flush()


main(*sys.argv[1:])
