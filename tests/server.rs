//! The server over real sockets: streams and documents say the same, replies are those
//! that are computed alone, and clients may leave, dawdle or send nonsense.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use k3_formats::container::Container;
use k3_formats::tokenizer::{Specials, StreamDecoder};
use k3_run::sampler::{Sampler, SamplingParams};
use k3_run::server::{ServeOptions, Server};
use k3_run::session::{Session, SessionOptions};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{demo_container, engine_args};

const CONTEXT: usize = 512;
const PATIENCE: Duration = Duration::from_secs(60);

/// The demo model and a place for files.
struct Demo(TempDir);

impl Demo {
    fn new() -> Self {
        Self(demo_container())
    }

    fn container(&self) -> PathBuf {
        self.0.path().join("container")
    }

    fn options(&self) -> ServeOptions {
        let args = engine_args(&self.container(), &["--chunk", "8", "--expert-cache", "64M"]);
        let comment_every = Duration::from_millis(20);
        ServeOptions { comment_every, ..ServeOptions::new(args, CONTEXT) }
    }

    fn serve(&self, change: impl FnOnce(&mut ServeOptions)) -> Running {
        let mut options = self.options();
        change(&mut options);
        let server = Server::start(options).unwrap();
        let address = server.address();
        wait_for("ready", || get(address, "/health").status == 200);
        Running { server: Some(server), address }
    }
}

/// A server that must end well.
struct Running {
    server: Option<Server>,
    address: SocketAddr,
}

impl Running {
    fn post(&self, path: &str, body: &Value) -> Answer {
        request(self.address, "POST", path, &[], body.to_string().as_bytes())
    }

    fn open(&self, path: &str, body: &Value) -> Events {
        Events::open(self.address, path, body)
    }

    fn metric(&self, name: &str) -> f64 {
        let text = get(self.address, "/metrics").text();
        let line = text.lines().find_map(|l| l.strip_prefix(name)).expect("a metric");
        line.trim().parse().expect("a number")
    }

    fn queued(&self) -> u64 {
        get(self.address, "/health").json()["queued"].as_u64().unwrap()
    }

    fn busy(&self) -> u64 {
        get(self.address, "/health").json()["slots"]["busy"].as_u64().unwrap()
    }

    fn end(mut self) {
        let server = self.server.take().unwrap();
        server.stop();
        server.stop();
        server.join().unwrap();
    }
}

fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "waited in vain: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A response that is complete.
struct Answer {
    status: u16,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

impl Answer {
    fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    fn ok(self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }
}

fn send(address: SocketAddr, head: &str, headers: &[(&str, &str)], body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut text = format!("{head} HTTP/1.1\r\nconnection: close\r\n");
    if !headers.iter().any(|h| h.0 == "host") {
        text += &format!("host: {address}\r\n");
    }
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    text += &format!("content-length: {}\r\n\r\n", body.len());
    stream.write_all(text.as_bytes()).unwrap();
    // A server may answer before it has read a body that it does not want.
    let _ = stream.write_all(body);
    stream
}

fn read_head(reader: &mut impl BufRead) -> (u16, BTreeMap<String, String>) {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).expect("a status").parse().unwrap();
    let mut headers = BTreeMap::new();
    loop {
        line.clear();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    (status, headers)
}

/// The body, whose chunks are put together if it has any.
struct Chunks<R> {
    reader: R,
    chunked: bool,
    left: usize,
    over: bool,
}

impl<R: BufRead> Read for Chunks<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if !self.chunked {
            return self.reader.read(buffer);
        }
        if self.left == 0 && !self.over {
            let mut line = String::new();
            self.reader.read_line(&mut line)?;
            self.left = usize::from_str_radix(line.trim(), 16).map_err(std::io::Error::other)?;
            self.over = self.left == 0;
        }
        if self.over {
            return Ok(0);
        }
        let most = buffer.len().min(self.left);
        let got = self.reader.read(&mut buffer[..most])?;
        self.left -= got;
        if self.left == 0 {
            self.reader.read_exact(&mut [0; 2])?;
        }
        Ok(got)
    }
}

fn response(stream: TcpStream) -> (u16, BTreeMap<String, String>, Chunks<BufReader<TcpStream>>) {
    let mut reader = BufReader::new(stream);
    let (status, headers) = read_head(&mut reader);
    let chunked = headers.get("transfer-encoding").is_some_and(|v| v == "chunked");
    (status, headers, Chunks { reader, chunked, left: 0, over: false })
}

fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Answer {
    let stream = send(address, &format!("{method} {path}"), headers, body);
    let (status, headers, mut chunks) = response(stream);
    let mut body = Vec::new();
    chunks.read_to_end(&mut body).unwrap();
    Answer { status, headers, body }
}

fn get(address: SocketAddr, path: &str) -> Answer {
    request(address, "GET", path, &[], b"")
}

/// A stream of events that is read line by line; dropping it closes the connection.
struct Events(BufReader<Chunks<BufReader<TcpStream>>>);

impl Events {
    fn open(address: SocketAddr, path: &str, body: &Value) -> Self {
        let stream = send(address, &format!("POST {path}"), &[], body.to_string().as_bytes());
        let (status, headers, chunks) = response(stream);
        assert_eq!(status, 200);
        assert_eq!(headers["content-type"], "text/event-stream");
        Self(BufReader::new(chunks))
    }

    /// The next line that is not blank; `None` at the end.
    fn line(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if !line.trim().is_empty() {
                return Some(line.trim_end().to_owned());
            }
        }
    }

    /// Reads up to a line that begins so.
    fn until(&mut self, start: &str) -> String {
        loop {
            let line = self.line().expect("a line before the end");
            if line.starts_with(start) {
                return line;
            }
        }
    }

    /// All data to the end, which must be there.
    fn rest(mut self) -> Vec<Value> {
        let mut chunks = Vec::new();
        loop {
            let line = self.line().expect("[DONE]");
            match line.strip_prefix("data: ") {
                Some("[DONE]") => break,
                Some(data) => chunks.push(serde_json::from_str(data).unwrap()),
                None => assert!(line.starts_with(':'), "{line}"),
            }
        }
        assert_eq!(self.line(), None, "nothing after the end");
        chunks
    }
}

/// Text and reasoning of a stream, why it ended, and its usage.
fn put_together(chunks: &[Value]) -> Value {
    let mut text: BTreeMap<&str, String> = BTreeMap::new();
    let (mut finish, mut usage, mut logprobs) = (Value::Null, Value::Null, Vec::new());
    for chunk in chunks {
        let choice = &chunk["choices"][0];
        for key in ["content", "reasoning_content"] {
            if let Some(more) = choice["delta"][key].as_str() {
                text.entry(key).or_default().push_str(more);
            }
        }
        logprobs.extend(choice["logprobs"]["content"].as_array().cloned().unwrap_or_default());
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
        if !chunk["usage"].is_null() {
            usage = chunk["usage"].clone();
        }
    }
    json!({"text": text, "finish": finish, "usage": usage, "logprobs": logprobs})
}

/// The same of a document.
fn of_document(body: &Value) -> Value {
    let choice = &body["choices"][0];
    let mut text = BTreeMap::new();
    for key in ["content", "reasoning_content"] {
        if let Some(value) = choice["message"][key].as_str() {
            text.insert(key, value.to_owned());
        }
    }
    let logprobs = choice["logprobs"]["content"].as_array().cloned().unwrap_or_default();
    json!({
        "text": text, "finish": choice["finish_reason"], "usage": body["usage"],
        "logprobs": logprobs,
    })
}

fn with(body: &Value, more: Value) -> Value {
    let mut body = body.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn streamed(body: &Value) -> Value {
    with(body, json!({"stream": true, "stream_options": {"include_usage": true}}))
}

/// Text as the library alone computes it: no server, one sequence, a fresh state.
struct Alone<'a> {
    container: &'a Container,
    engine: k3_run::engine::Engine<'a>,
}

impl<'a> Alone<'a> {
    fn new(container: &'a Container) -> Self {
        let args = engine_args(&container.dir, &["--chunk", "32", "--expert-cache", "64M"]);
        let engine = k3_run::open::engine(container, &args, k3_run::cli::Act8::Experts).unwrap();
        Self { container, engine }
    }

    fn text(&mut self, prompt: &str, seed: u64, tokens: usize) -> String {
        let tokenizer = k3_run::open::tokenizer(&self.container.dir).unwrap();
        let params = SamplingParams { seed: Some(seed), ..SamplingParams::RECOMMENDED };
        let mut sampler = Sampler::new(params, tokenizer.vocab_size()).unwrap();
        let mut session = Session::new(&self.engine, CONTEXT);
        let mut next = tokenizer.encode(prompt, Specials::Recognize);
        let (mut decoder, mut text) = (StreamDecoder::new(), String::new());
        let cancel = AtomicBool::new(false);
        for _ in 0..tokens {
            let logits = session.extend(&mut self.engine, &next, &cancel, |_| {}).unwrap();
            let id = sampler.sample(logits).unwrap();
            sampler.accept(id);
            text += &decoder.push(tokenizer.token_bytes(id).unwrap());
            next = vec![id];
        }
        text + &decoder.finish()
    }
}

fn text_body(prompt: &str, seed: u64, tokens: usize) -> Value {
    json!({"prompt": prompt, "seed": seed, "max_tokens": tokens})
}

const PROMPTS: [&str; 6] = [
    "Elizabeth was surprised to find that",
    "It is a truth universally acknowledged, that",
    "Elizabeth was surprised to see",
    "Mr. Darcy",
    "The weather at Bath that winter had been so very bad that Anne",
    "She",
];

#[test]
fn streams_and_documents_say_the_same() {
    let demo = Demo::new();
    let server = demo.serve(|_| {});
    let messages = json!([{"role": "user", "content": "Who is Mr. Darcy?"}]);
    for body in [
        json!({"temperature": 0, "max_tokens": 20}),
        json!({"seed": 5, "max_completion_tokens": 24, "reasoning_effort": "low"}),
        json!({"seed": 6, "max_tokens": 30, "reasoning_effort": "none", "stop": ["e"]}),
        json!({"seed": -7, "max_tokens": 12, "chat_template_kwargs": {"enable_thinking": false},
               "logprobs": true, "top_logprobs": 3}),
        json!({"temperature": 0.7, "top_p": 0.9, "seed": 8, "max_tokens": 16, "user": "x",
               "response_format": {"type": "json_object"}, "logit_bias": {"5": -100}}),
    ] {
        let body = with(&body, json!({"messages": messages, "model": "whatever"}));
        let mut whole = of_document(&server.post("/v1/chat/completions", &body).ok());
        let mut stream =
            put_together(&server.open("/v1/chat/completions", &streamed(&body)).rest());
        for got in [&mut whole, &mut stream] {
            // What a slot remembers may differ, nothing else.
            got["usage"]["prompt_tokens_details"] = Value::Null;
        }
        assert!(whole["usage"]["completion_tokens"].as_u64().unwrap() > 0);
        if stream["text"].get("content") == Some(&json!("")) {
            stream["text"].as_object_mut().unwrap().remove("content");
        }
        if whole["text"].get("content") == Some(&json!("")) {
            whole["text"].as_object_mut().unwrap().remove("content");
        }
        assert_eq!(whole, stream, "{body}");
    }
    let body = with(&text_body(PROMPTS[0], 3, 12), json!({"logprobs": 2}));
    let whole = server.post("/v1/completions", &body).ok();
    let chunks = server.open("/v1/completions", &streamed(&body)).rest();
    let text: String = chunks.iter().map(|c| c["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(whole["choices"][0]["text"], text);
    assert_eq!(whole["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), 12);
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 12);
    // Without being asked for, a stream tells no usage.
    let plain = server.open("/v1/completions", &with(&body, json!({"stream": true}))).rest();
    assert!(plain.iter().all(|chunk| chunk.get("usage").is_none()));
    server.end();
}

#[test]
fn replies_that_run_side_by_side_are_as_alone() {
    let demo = Demo::new();
    let container = Container::open(&demo.container()).unwrap();
    let mut alone = Alone::new(&container);
    let jobs: Vec<(&str, u64, usize)> =
        (0..24).map(|i| (PROMPTS[i as usize % 6], 100 + i / 3, 6 + i as usize % 14)).collect();
    let want: Vec<String> =
        jobs.iter().map(|&(prompt, seed, tokens)| alone.text(prompt, seed, tokens)).collect();
    let server = demo.serve(|o| o.slots = 2);
    let got: Vec<String> = thread::scope(|scope| {
        let server = &server;
        let ask = |&(prompt, seed, tokens): &(&'static str, u64, usize)| {
            scope.spawn(move || {
                let body = text_body(prompt, seed, tokens);
                if seed % 2 == 0 {
                    let body = server.post("/v1/completions", &body).ok();
                    return body["choices"][0]["text"].as_str().unwrap().to_owned();
                }
                let chunks = server.open("/v1/completions", &streamed(&body)).rest();
                chunks.iter().map(|c| c["choices"][0]["text"].as_str().unwrap()).collect()
            })
        };
        let threads: Vec<_> = jobs.iter().map(ask).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(got, want);
    assert_eq!(server.metric("k3_replies_total{outcome=\"finished\"}"), 24.0);
    // A prompt that a slot has already is not computed again, whoever asked between.
    let ask = |prompt: &str| server.post("/v1/completions", &text_body(prompt, 1, 5)).ok();
    let [first, _, again] = [PROMPTS[4], PROMPTS[1], PROMPTS[4]].map(ask);
    assert_eq!(first["choices"], again["choices"]);
    let usage = &again["usage"];
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]);
    server.end();
}

/// A prompt of some 200 tokens, and another with the same beginning.
fn long_prompts() -> [String; 2] {
    let sentence = "Emma Woodhouse, handsome, clever, and rich, with a comfortable home. ";
    [sentence.repeat(9) + "She", sentence.repeat(9) + "They"]
}

#[test]
fn clients_may_leave_at_any_time() {
    let demo = Demo::new();
    let container = Container::open(&demo.container()).unwrap();
    let mut alone = Alone::new(&container);
    let [long, other] = long_prompts();
    let server = demo.serve(|o| o.engine.chunk = 1);
    // While it writes, with another in the queue that leaves first.
    let mut writing = server.open("/v1/completions", &streamed(&text_body("She", 1, 200)));
    writing.until("data: ");
    let mut waiting = server.open("/v1/completions", &streamed(&text_body("He", 1, 200)));
    assert_eq!(waiting.until(":"), ": queued, 0 ahead");
    drop(waiting);
    wait_for("the queue forgets", || server.queued() == 0);
    drop(writing);
    wait_for("the slot is free", || server.busy() == 0);
    // While its prompt is read.
    let mut reading = server.open("/v1/completions", &streamed(&text_body(&long, 1, 200)));
    reading.until(": prefill");
    drop(reading);
    wait_for("the slot is free", || server.busy() == 0);
    assert_eq!(server.metric("k3_replies_total{outcome=\"cancelled\"}"), 2.0);
    // What they left behind changes nothing.
    for prompt in [&long, &other, &long] {
        let body = server.post("/v1/completions", &text_body(prompt, 9, 6)).ok();
        assert_eq!(body["choices"][0]["text"], alone.text(prompt, 9, 6));
    }
    // Nor is one that waits for a document bound to stay.
    let body = text_body("She", 2, 200).to_string();
    let silent = send(server.address, "POST /v1/completions", &[], body.as_bytes());
    wait_for("it is at work", || server.busy() == 1);
    drop(silent);
    wait_for("it is seen to leave", || {
        server.metric("k3_replies_total{outcome=\"cancelled\"}") == 3.0
    });
    server.end();
}

#[test]
fn one_that_leaves_does_not_disturb_the_others() {
    let demo = Demo::new();
    let container = Container::open(&demo.container()).unwrap();
    let want = Alone::new(&container).text("Mr. Darcy", 4, 60);
    let server = demo.serve(|o| o.slots = 2);
    let stays = server.open("/v1/completions", &streamed(&text_body("Mr. Darcy", 4, 60)));
    for seed in 0..8 {
        let mut leaves = server.open("/v1/completions", &streamed(&text_body("She", seed, 99)));
        leaves.until("data: ");
    }
    let chunks = stays.rest();
    let got: String = chunks.iter().map(|c| c["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(got, want);
    server.end();
}

#[test]
fn a_full_queue_says_when_to_come_back() {
    let demo = Demo::new();
    let server = demo.serve(|o| o.queue = 1);
    let mut first = server.open("/v1/completions", &streamed(&text_body("She", 1, 250)));
    first.until("data: ");
    let mut second = server.open("/v1/completions", &streamed(&text_body("He", 1, 3)));
    second.until(": queued");
    let third = server.post("/v1/completions", &text_body("It", 1, 3));
    assert_eq!(third.status, 429);
    assert!(third.headers["retry-after"].parse::<u64>().unwrap() >= 1);
    assert_eq!(third.json()["error"]["code"], "queue_full");
    drop(first);
    assert_eq!(second.rest().last().unwrap()["choices"][0]["finish_reason"], "length");
    server.end();
}

#[test]
fn a_slow_reader_holds_nobody_up_and_loses_nothing() {
    let demo = Demo::new();
    let container = Container::open(&demo.container()).unwrap();
    let want = Alone::new(&container).text("She", 1, 240);
    let server = demo.serve(|_| {});
    let slow = server.open("/v1/completions", &streamed(&text_body("She", 1, 240)));
    let quick = server.post("/v1/completions", &text_body("He", 1, 3)).ok();
    assert_eq!(quick["usage"]["completion_tokens"], 3);
    let chunks = slow.rest();
    let got: String = chunks.iter().map(|c| c["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(got, want);
    server.end();
}

#[test]
fn faults_are_told_in_openais_shape() {
    let demo = Demo::new();
    let server = demo.serve(|_| {});
    let chat = "/v1/chat/completions";
    let user = r#"[{"role": "user", "content": "x"}]"#;
    let over = format!(r#"{{"prompt": "{}"}}"#, "word ".repeat(CONTEXT));
    let deep = "[".repeat(100_000);
    for (path, body, status, param) in [
        (chat, "", 400, Value::Null),
        (chat, "{", 400, Value::Null),
        (chat, "[]", 400, Value::Null),
        (chat, "\u{0}", 400, Value::Null),
        (chat, deep.as_str(), 400, Value::Null),
        (chat, "{}", 400, json!("messages")),
        (chat, r#"{"messages": []}"#, 400, json!("messages")),
        (chat, r#"{"messages": [{"role": "king"}]}"#, 400, json!("messages[0].role")),
        (chat, &format!(r#"{{"messages": {user}, "n": 2}}"#), 400, json!("n")),
        (chat, &format!(r#"{{"messages": {user}, "temperature": 3}}"#), 400, json!("temperature")),
        (chat, &format!(r#"{{"messages": {user}, "stream": "yes"}}"#), 400, json!("stream")),
        (chat, &format!(r#"{{"messages": {user}, "stop": [""]}}"#), 400, json!("stop")),
        (
            chat,
            &format!(r#"{{"messages": {user}, "logit_bias": {{"99999999": 1}}}}"#),
            400,
            json!("logit_bias"),
        ),
        (
            chat,
            &format!(r#"{{"messages": {user}, "top_logprobs": 2}}"#),
            400,
            json!("top_logprobs"),
        ),
        (
            chat,
            &format!(r#"{{"messages": {user}, "tool_choice": "required"}}"#),
            400,
            json!("tool_choice"),
        ),
        ("/v1/completions", "{}", 400, json!("prompt")),
        ("/v1/completions", r#"{"prompt": ""}"#, 400, json!("prompt")),
        ("/v1/completions", r#"{"prompt": [1, -1]}"#, 400, json!("prompt")),
        ("/v1/completions", r#"{"prompt": ["a", "b"]}"#, 400, json!("prompt")),
        ("/v1/completions", r#"{"prompt": "a", "echo": true}"#, 400, json!("echo")),
        ("/v1/completions", &over, 400, Value::Null),
        ("/v1/tokenize", "{}", 400, json!("text")),
        ("/v1/detokenize", r#"{"tokens": [1e9]}"#, 400, json!("tokens")),
        ("/v1/nothing", "{}", 404, Value::Null),
        ("/v1/models", "{}", 405, Value::Null),
    ] {
        let answer = request(server.address, "POST", path, &[], body.as_bytes());
        assert_eq!(answer.status, status, "{path} {body:.80}: {}", answer.text());
        let error = &answer.json()["error"];
        assert_eq!(error["param"], param, "{path} {body:.80}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(!error["message"].as_str().unwrap().is_empty());
    }
    let bytes = request(server.address, "POST", chat, &[], b"\xff\xfe");
    assert_eq!(bytes.status, 400);
    let large = vec![b' '; 2 << 20];
    assert_eq!(request(server.address, "POST", chat, &[], &large).status, 413);
    // A context that is too small for prompt and reply has its own code.
    let answer = request(server.address, "POST", "/v1/completions", &[], over.as_bytes());
    assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
    server.end();
}

#[test]
fn a_missing_shard_fails_the_requests_that_need_it_and_no_more() {
    let demo = Demo::new();
    let body = text_body("It is a truth", 3, 4);
    let path = "/v1/completions";
    let want = {
        let server = demo.serve(|_| {});
        let want = server.post(path, &body).ok()["choices"][0]["text"].clone();
        server.end();
        want
    };
    // A copy of the snapshot without the shard of the last layer's experts.
    let dir = demo.0.path().join("shards");
    fs_err::create_dir(&dir).unwrap();
    let container = Container::open(&demo.container()).unwrap();
    let layer = container.config.layers() - 1;
    let part = k3_formats::tensor_name::ExpertPart::GatePacked;
    let (shard, _) = container.experts.entry(layer, 0).part(part);
    let name = container.manifest.shards[shard].name.clone();
    let from = crate::support::demo_snapshot();
    for shard in container.manifest.shards.iter().filter(|s| s.name != name) {
        fs_err::copy(from.join(&shard.name), dir.join(&shard.name)).unwrap();
    }
    let engine = |allow: &[&str]| {
        let mut options = vec!["--chunk", "8", "--expert-cache", "64M", "--snapshot"];
        options.push(dir.to_str().unwrap());
        options.extend(allow);
        engine_args(&demo.container(), &options)
    };
    // A status can only be told before the first comment.
    let comment_every = Duration::from_secs(60);
    let serve = |allow: &[&str]| {
        Server::start(ServeOptions { comment_every, ..ServeOptions::new(engine(allow), CONTEXT) })
    };
    let server = serve(&["--allow-missing"]).unwrap();
    let address = server.address();
    wait_for("ready", || get(address, "/health").status == 200);
    let server = Running { server: Some(server), address };
    for round in 0..3 {
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 500, "{round}: {}", answer.text());
        let error = &answer.json()["error"];
        assert_eq!(
            (&error["type"], &error["code"]),
            (&json!("server_error"), &json!("model_incomplete"))
        );
        assert!(!answer.text().contains(dir.to_str().unwrap()), "no path leaves the server");
        let mut events = server.open(path, &streamed(&body));
        let text = events.until("data: {\"error\"");
        assert!(text.contains("model_incomplete"), "{text}");
        assert_eq!(get(address, "/health").status, 200);
        wait_for("idle", || server.busy() == 0);
    }
    server.end();
    // It was only the shard.
    fs_err::copy(from.join(&name), dir.join(&name)).unwrap();
    let server = serve(&[]).unwrap();
    let address = server.address();
    wait_for("ready", || get(address, "/health").status == 200);
    let server = Running { server: Some(server), address };
    assert_eq!(server.post(path, &body).ok()["choices"][0]["text"], want);
    server.end();
}

#[test]
fn only_those_who_may_are_served() {
    let demo = Demo::new();
    let mut open = demo.options();
    open.host = [0, 0, 0, 0].into();
    let refused = Server::start(open).unwrap_err().to_string();
    assert!(refused.contains("no API key is set"), "{refused}");

    let server = demo.serve(|o| {
        o.api_keys = vec!["secret".into()];
        o.cors = vec!["http://front.example".into()];
    });
    let get =
        |path: &str, headers: &[(&str, &str)]| request(server.address, "GET", path, headers, b"");
    assert_eq!(get("/v1/models", &[]).status, 401);
    assert_eq!(get("/v1/models", &[("authorization", "Bearer wrong")]).status, 401);
    assert_eq!(get("/metrics", &[]).status, 401);
    let key = ("authorization", "Bearer secret");
    assert_eq!(get("/v1/models", &[key]).ok()["data"][0]["id"], "kimi-k3");
    assert_eq!(get("/health", &[]).status, 200);
    let origin = ("origin", "http://front.example");
    let answer = get("/v1/models", &[key, origin]);
    assert_eq!(answer.headers["access-control-allow-origin"], "http://front.example");
    assert_eq!(get("/v1/models", &[key, ("origin", "http://evil.example")]).status, 403);
    let asks = ("access-control-request-method", "POST");
    let preflight =
        request(server.address, "OPTIONS", "/v1/chat/completions", &[origin, asks], b"");
    assert_eq!(preflight.status, 204);
    assert!(preflight.headers["access-control-allow-headers"].contains("authorization"));
    server.end();

    let server = demo.serve(|_| {});
    let get = |headers: &[(&str, &str)]| {
        request(server.address, "GET", "/v1/models", headers, b"").status
    };
    assert_eq!(get(&[("host", "localhost:1")]), 200);
    assert_eq!(get(&[("host", "evil.example")]), 403, "a name that was pointed at this machine");
    assert_eq!(get(&[("origin", "http://evil.example")]), 403, "a page from elsewhere");
    server.end();
}

/// Clients that never finish the head of a request, at first or after a good one, are let go,
/// whether they are silent or send a byte now and then; others are served meanwhile.
#[test]
fn slow_headers_are_let_go() {
    let demo = Demo::new();
    let server = demo.serve(|o| o.head_time = Duration::from_millis(400));
    let connect = || TcpStream::connect(server.address).unwrap();
    let mut silent = connect();
    let mut after = connect();
    after.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /hea").unwrap();
    let mut dripping = connect();
    let mut dripped = 0;
    for byte in b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ".iter().chain([b'x'; 200].iter()) {
        assert_eq!(get(server.address, "/health/live").status, 200);
        if dripping.write_all(&[*byte]).is_err() {
            break;
        }
        dripped += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(dripped < 200, "it was let drip");
    let mut answer = Vec::new();
    let end = silent.read_to_end(&mut answer);
    assert!(end.is_err() || answer.is_empty(), "{}", String::from_utf8_lossy(&answer));
    let mut answer = Vec::new();
    let _ = after.read_to_end(&mut answer);
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    server.end();
}

#[test]
fn small_endpoints() {
    let demo = Demo::new();
    let server = demo.serve(|o| o.model = "demo".into());
    let ids = server.post("/v1/tokenize", &json!({"text": "Mr. Darcy<|open|>"})).ok();
    let body = json!({"tokens": ids["tokens"]});
    assert_eq!(server.post("/detokenize", &body).ok()["text"], "Mr. Darcy<|open|>");
    let special = json!({"text": "<|open|>", "specials": true});
    assert_eq!(server.post("/tokenize", &special).ok()["count"], 1);
    let chat = json!({"messages": [{"role": "user", "content": "x"}]});
    assert!(server.post("/v1/tokenize", &chat).ok()["count"].as_u64().unwrap() > 5);
    assert_eq!(get(server.address, "/v1/models/demo").ok()["id"], "demo");
    assert_eq!(get(server.address, "/v1/models/other").status, 404);
    assert_eq!(get(server.address, "/health/live").status, 200);
    let page = get(server.address, "/");
    assert!(page.headers["content-security-policy"].starts_with("default-src 'none'"));
    for part in ["/", "/chat.js", "/chat.css"] {
        let text = get(server.address, part).text();
        assert!(!text.contains("http:") && !text.contains("https:"), "{part} asks others");
        assert!(!text.contains("innerHTML"), "{part} makes markup of text");
    }
    let ids = [&ids["tokens"], &ids["tokens"]];
    let body = json!({"prompt": ids[0], "max_tokens": 2, "temperature": 0});
    assert_eq!(server.post("/v1/completions", &body).ok()["usage"]["completion_tokens"], 2);
    let metrics = get(server.address, "/metrics").text();
    for name in ["k3_queue_requests 0", "k3_rows_per_second{phase=\"decode\"}", "k3_memory_bytes"] {
        assert!(metrics.contains(name), "{name}");
    }
    server.end();
}

#[test]
fn the_end_lets_replies_finish() {
    let demo = Demo::new();
    let server = demo.serve(|_| {});
    let mut running = server.open("/v1/completions", &streamed(&text_body("She", 1, 80)));
    running.until("data: ");
    server.server.as_ref().unwrap().stop();
    let chunks = running.rest();
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 80, "it was not cut off");
    server.server.unwrap().join().unwrap();
}

#[test]
fn conversations_outlive_the_process() {
    let demo = Demo::new();
    let save = |o: &mut ServeOptions| {
        o.save_dir = Some(demo.0.path().join("saved"));
        o.slots = 2;
    };
    let body = |ids: &[Value]| json!({"prompt": ids, "seed": 1, "max_tokens": 1});
    let server = demo.serve(save);
    let ids = server.post("/v1/tokenize", &json!({"text": PROMPTS[4]})).ok()["tokens"].clone();
    let ids = ids.as_array().unwrap();
    let (first, all) = (&ids[..ids.len() - 1], &ids[..]);
    server.post("/v1/completions", &body(first)).ok();
    server.end();

    let fresh = demo.serve(|_| {});
    let server = demo.serve(save);
    let got = server.post("/v1/completions", &body(all)).ok();
    let want = fresh.post("/v1/completions", &body(all)).ok();
    let cached = |body: &Value| body["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    assert_eq!((cached(&got), cached(&want)), (json!(first.len()), json!(0)));
    assert_eq!(got["choices"], want["choices"]);
    fresh.end();
    server.end();
}

#[test]
fn the_end_does_not_wait_for_ever() {
    let demo = Demo::new();
    let server = demo.serve(|o| o.grace = Duration::from_millis(50));
    let mut running = server.open("/v1/completions", &streamed(&text_body("She", 1, 250)));
    running.until("data: ");
    let ends = Instant::now();
    server.server.as_ref().unwrap().stop();
    while running.line().is_some() {}
    server.server.unwrap().join().unwrap();
    assert!(ends.elapsed() < Duration::from_secs(20));
}

#[test]
fn slots_are_counted_in_the_budget() {
    let demo = Demo::new();
    let container = Container::open(&demo.container()).unwrap();
    let mut options = demo.options();
    let one = options.slot_bytes(&container);
    options.slots = 4;
    assert_eq!(options.slot_bytes(&container), 4 * one);
    options.session = SessionOptions::conversation(CONTEXT, 6, None, 0);
    assert!(options.slot_bytes(&container) > 4 * one, "checkpoints count");
    options.engine.ram = Some(one);
    let ended = Server::start(options).unwrap().join().unwrap_err().to_string();
    assert!(ended.contains("--ram") || ended.contains("needed"), "{ended}");
}
