"""A server whose delays are known, in a process of its own: `python known_server.py FIRST RATE`.

It prints its port, and serves until its standard input ends. An answer's first token comes FIRST
seconds after its question at the least, and twice that at the most; all answers under way
together get RATE tokens a second, one after the other. The first token of each is its number.
GET /sent says when each question had come, when each token was sent, by the clock that processes
of one machine share, and forgets it."""
import asyncio,json,random,sys,time

HEAD = b'HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n'
LAST = b'0\r\n\r\n'

def event(choices, **more):
    "A chunk of a stream, as long as those of servers are"
    d = dict(id='chatcmpl-0123456789abcdef', object='chat.completion.chunk', created=1764000000,
        model='known', system_fingerprint=None, choices=choices)
    raw = b'data: '+json.dumps(d|more).encode()+b'\n\n'
    return b'%x\r\n%b\r\n'%(len(raw), raw)

def token(text, finish=None):
    "A token"
    delta = dict(content=text)
    return event([dict(index=0, delta=delta, logprobs=None, finish_reason=finish)])

def end(prompt, n):
    "What follows the last token"
    usage = dict(prompt_tokens=prompt, completion_tokens=n, total_tokens=prompt+n)
    return event([], usage=usage)+b'e\r\ndata: [DONE]\n\n\r\n'+LAST

class Known(asyncio.Protocol):
    "A connection, which asks once"
    sent = [] # Of all connections, by number: when it was asked, and when each token was sent
    under_way = 0
    def __init__(self, first, rate):
        self.first,self.rate = first,rate
        self.raw = b''
    def connection_made(self, transport):
        self.transport,self.loop = transport,asyncio.get_running_loop()
    def data_received(self, data):
        self.raw += data
        head,_,body = self.raw.partition(b'\r\n\r\n')
        if head.startswith(b'GET'):
            return self.report()
        size = int(head.lower().partition(b'content-length:')[2].split()[0])
        if len(body)==size:
            self.begin(time.monotonic(), json.loads(body))
    def report(self):
        "Say what was sent"
        raw = json.dumps(Known.sent).encode()
        Known.sent = []
        head = b'HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n'%len(raw)
        self.transport.write(head+raw)
        self.transport.close()
    def begin(self, now, body):
        "A question has come"
        Known.under_way += 1
        self.number,self.n = len(Known.sent),body['max_tokens']
        self.prompt = len(body['messages'][-1]['content'].split())
        self.times = [now]
        Known.sent.append(self.times)
        wait = self.first*(1+random.Random(self.number).random())
        self.loop.call_at(now+wait, self.send, now+wait, 0)
    def send(self, due, i):
        "Token `i`, which is due"
        last = i==self.n-1
        raw = token(f'{self.number} ' if i==0 else 'word ', 'length' if last else None)
        raw = HEAD*(i==0)+raw+(end(self.prompt, self.n) if last else b'')
        self.times.append(time.monotonic())
        self.transport.write(raw)
        if last:
            Known.under_way -= 1
            return self.transport.close()
        due += Known.under_way/self.rate
        self.loop.call_at(due, self.send, due, i+1)

async def main(first, rate):
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Known(first, rate), '127.0.0.1', 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)

if __name__=='__main__':
    asyncio.run(main(*map(float, sys.argv[1:])))
