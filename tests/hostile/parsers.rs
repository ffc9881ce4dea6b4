//! Every parser of bytes from outside as one function of those bytes, shared by the test on
//! a stable toolchain and the fuzz targets.
//!
//! A function returns whatever it likes to the optimizer and nothing to the caller: it
//! passes if it comes back, and asserts what must hold of anything that was accepted.

use std::path::{Path, PathBuf};

use fs_err as fs;
use k3_formats::config::ModelConfig;
use k3_formats::container::{Container, Manifest};
use k3_formats::expert_table::ExpertTable;
use k3_formats::safetensors_header::Header;
use k3_formats::snapshot::{WeightIndex, check_plain_name};
use k3_formats::tensor_name::{ExpertPart, dense_tensors};
use k3_formats::tokenizer::{Specials, Tokenizer};
use k3_run::chat::json::{Dialect, Separators};
use k3_run::chat::{ChatRequest, Defaults, Json, Markup, ReplyParser, Start, xtml};

/// A parser and its name.
pub(crate) type Parser = (&'static str, fn(&World, &[u8]));

/// All of them.
pub(crate) const PARSERS: [Parser; 11] = [
    ("header", header),
    ("index", index),
    ("config", config),
    ("tokenizer", tokenizer),
    ("prepared", prepared),
    ("manifest", manifest),
    ("experts", experts),
    ("container", container),
    ("chat", chat),
    ("reply", reply),
    ("json", json),
];

/// A good container, and what parsers need besides their bytes.
pub(crate) struct World {
    container: PathBuf,
    /// Names of the container's files in order.
    files: Vec<String>,
    config: ModelConfig,
    shard_sizes: Vec<u64>,
    tokenizer: Tokenizer,
    markup: Markup,
    scratch: PathBuf,
}

impl World {
    /// Reads a good container; `scratch` is a folder on the same file system.
    pub(crate) fn new(container: &Path, scratch: &Path) -> Self {
        let open = Container::open(container).expect("a good container");
        let tokenizer = Tokenizer::open_prepared(&container.join("tokenizer.bin")).expect("good");
        let entries = fs::read_dir(container).expect("a folder").map(|e| e.expect("a file"));
        let mut files: Vec<String> =
            entries.map(|e| e.file_name().into_string().expect("UTF-8")).collect();
        files.sort_unstable();
        Self {
            container: container.to_path_buf(),
            files,
            shard_sizes: open.manifest.shards.iter().map(|s| s.size).collect(),
            config: open.config,
            markup: Markup::of(&tokenizer).expect("the tokens of the chat format"),
            tokenizer,
            scratch: scratch.to_path_buf(),
        }
    }

    /// Good bytes for a parser, to begin from.
    pub(crate) fn seeds(&self, parser: &str, snapshot: &Path) -> Vec<Vec<u8>> {
        let read = |path: PathBuf| fs::read(path).expect("a good file");
        let head = |path: PathBuf| {
            let mut bytes = read(path);
            let size = bytes.len() as u64;
            let end = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
            bytes.truncate(end);
            bytes[..8].copy_from_slice(&size.to_le_bytes());
            bytes
        };
        match parser {
            "header" => vec![
                head(snapshot.join("model-00009-of-000010.safetensors")),
                head(self.container.join("dense-head.safetensors")),
            ],
            "index" => vec![
                br#"{"metadata":{"total_size":8},"weight_map":{"a":"x.safetensors","b.c":"y.safetensors"}}"#
                    .to_vec(),
            ],
            "config" => vec![read(snapshot.join("config.json"))],
            "tokenizer" => {
                let mut both = read(snapshot.join("tiktoken.model"));
                both.push(0xff);
                both.extend(read(snapshot.join("tokenizer_config.json")));
                vec![both]
            }
            "prepared" => {
                let mut bytes = read(self.container.join("tokenizer.bin"));
                bytes.truncate(bytes.len() - 32);
                vec![bytes]
            }
            "manifest" => vec![read(self.container.join("manifest.json"))],
            "experts" => vec![read(self.container.join("experts.k3x"))],
            "container" => (0..self.files.len() as u8)
                .map(|file| [&[file, 9, 0, 0, 0, 2], &b"\xff\0"[..]].concat())
                .collect(),
            "chat" => vec![
                br#"{"messages":[{"role":"system","content":"be brief"},{"role":"user","content":[{"type":"text","text":"hi"}]},
                {"role":"assistant","content":null,"tool_calls":[{"id":"f:0","type":"function","function":{"name":"f","arguments":"{\"a\":[1,2.5e-7],\"b\":{}}"}}]},
                {"role":"tool","tool_call_id":"f:0","content":"ok"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],
                "tool_choice":"auto","response_format":{"type":"json_object"},"thinking":true,"effort":"low"}"#
                    .to_vec(),
            ],
            "reply" => {
                let text = "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool=\"f\" index=\"0\"<|sep|>\
                    <|open|>argument key=\"a\" type=\"number\"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|end_of_msg|>";
                let ids = self.tokenizer.encode(text, Specials::Recognize);
                vec![ids.iter().flat_map(|&id| (id as u16).to_le_bytes()).collect()]
            }
            "json" => vec![br#"{"a":[1,-0.5e+10,true,null,"\u00e9\n\ud83d\ude00"],"b":{"c":{}}}"#.to_vec()],
            other => panic!("no such parser: {other}"),
        }
    }
}

/// The first eight bytes are the size of the file, then comes the JSON.
fn header(_: &World, bytes: &[u8]) {
    let Some((size, json)) = bytes.split_first_chunk::<8>() else { return };
    let size = u64::from_le_bytes(*size);
    if let Ok(header) = Header::parse(json, size) {
        let mut at = 0;
        for tensor in &header.tensors {
            assert_eq!(tensor.begin, at, "back to back");
            at = tensor.end;
        }
        assert_eq!(header.data_start.checked_add(at), Some(size), "to the end of the file");
    }
}

fn index(_: &World, bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(index) = WeightIndex::parse(text) {
        for name in index.files() {
            check_plain_name(name).expect("nothing leads out of the folder");
        }
        for (tensor, shard) in index.tensors() {
            assert!(shard < index.files().len());
            assert_eq!(index.shard_of(tensor), Some(shard));
        }
    }
}

fn config(_: &World, bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(config) = ModelConfig::parse(text) {
        for spec in dense_tensors(&config) {
            let _ = (spec.elements(), spec.bytes(), spec.matrix_dims());
        }
        ExpertPart::ALL.iter().for_each(|part| assert!(part.bytes(&config) > 0));
    }
}

/// `tiktoken.model`, a byte 0xff, `tokenizer_config.json`.
fn tokenizer(_: &World, bytes: &[u8]) {
    let at = bytes.iter().position(|&b| b == 0xff).unwrap_or(bytes.len());
    let (model, config) = (&bytes[..at], &bytes[(at + 1).min(bytes.len())..]);
    let base = model.split(|&b| b == b'\n').filter(|line| !line.is_empty()).count();
    if let Ok(tokenizer) = Tokenizer::from_snapshot_bytes(model, config, base) {
        let again = Tokenizer::from_prepared_bytes(&tokenizer.write_prepared());
        assert!(again.is_ok(), "what was accepted can be prepared and read");
        encode(&tokenizer);
    }
}

/// A prepared tokenizer without its digest, so that damage gets past it.
fn prepared(_: &World, bytes: &[u8]) {
    let digest = k3_formats::digest::Digest::of(bytes).to_string();
    let digest = (0..32).map(|i| u8::from_str_radix(&digest[2 * i..2 * i + 2], 16).expect("hex"));
    let mut whole = bytes.to_vec();
    whole.extend(digest);
    if let Ok(tokenizer) = Tokenizer::from_prepared_bytes(&whole) {
        assert!(tokenizer.write_prepared() == whole, "one tokenizer, one file");
        encode(&tokenizer);
    }
    let _ = Tokenizer::from_prepared_bytes(bytes);
}

fn encode(tokenizer: &Tokenizer) {
    let text = "The  quick\tbrown fox's 1234 灯塔\r\n\u{1f600}<|open|>";
    let ids = tokenizer.encode(text, Specials::Text);
    assert_eq!(tokenizer.decode(&ids), text, "text survives any vocabulary with all bytes");
    let _ = tokenizer.decode(&tokenizer.encode(text, Specials::Recognize));
}

fn manifest(_: &World, bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(manifest) = Manifest::parse(text) {
        let again = Manifest::parse(&manifest.to_text()).expect("its own text");
        assert_eq!(again, manifest);
        let _ = manifest.sums();
    }
}

fn experts(world: &World, bytes: &[u8]) {
    // At an odd address too, as bytes of a stranger may lie.
    let mut shifted = vec![0];
    shifted.extend_from_slice(bytes);
    let _ = ExpertTable::new(&shifted[1..], &world.config, &world.shard_sizes);
    if let Ok(table) = ExpertTable::new(bytes, &world.config, &world.shard_sizes) {
        for layer in world.config.moe_layers() {
            for expert in 0..world.config.moe.experts {
                for part in ExpertPart::ALL {
                    let (shard, offset) = table.entry(layer, expert).part(part);
                    assert!(offset + part.bytes(&world.config) <= world.shard_sizes[shard]);
                }
            }
        }
    }
}

/// Patches of a good container: file number, offset (four bytes), length, and that many
/// bytes to write there; without a length the file ends there.
fn container(world: &World, mut bytes: &[u8]) {
    let folder = tempfile::tempdir_in(&world.scratch).expect("a folder");
    let mut patched: Vec<Option<Vec<u8>>> = vec![None; world.files.len()];
    while let Some((head, rest)) = bytes.split_first_chunk::<6>() {
        let number = usize::from(head[0]) % world.files.len();
        let file = patched[number].get_or_insert_with(|| {
            fs::read(world.container.join(&world.files[number])).expect("a good file")
        });
        let at = u32::from_le_bytes(head[1..5].try_into().expect("four bytes")) as usize;
        let at = at % (file.len() + 1);
        let (new, rest) = rest.split_at(rest.len().min(head[5].into()));
        match new {
            [] => file.truncate(at),
            new => {
                let n = new.len().min(file.len() - at);
                file[at..at + n].copy_from_slice(&new[..n]);
            }
        }
        bytes = rest;
    }
    for (name, patched) in world.files.iter().zip(patched) {
        let path = folder.path().join(name);
        match patched {
            Some(bytes) => fs::write(path, bytes).expect("written"),
            None => fs::hard_link(world.container.join(name), path).expect("linked"),
        }
    }
    if let Ok(container) = Container::open(folder.path()) {
        for spec in dense_tensors(&container.config) {
            let _ = container.matrix(&spec.name).map(|m| (m.codes.len(), m.scales.len()));
            let _ = container.stored_bytes(&spec.name).map(|b| b.iter().max().copied());
        }
    }
    let _ = k3_run::open::tokenizer(folder.path());
}

fn chat(world: &World, bytes: &[u8]) {
    let Ok(request) = ChatRequest::from_json(bytes, Defaults::PUBLISHED) else { return };
    if let Ok(prompt) = xtml::render(&request) {
        assert!(!prompt.encode(&world.tokenizer).is_empty());
    }
}

fn reply(world: &World, bytes: &[u8]) {
    for start in [Start::Reasoning, Start::Answer] {
        let mut parser = ReplyParser::new(world.markup.clone(), start);
        let (mut events, mut reply) = (Vec::new(), k3_run::chat::Reply::default());
        for pair in bytes.as_chunks::<2>().0 {
            parser.push(&world.tokenizer, u16::from_le_bytes(*pair).into(), &mut events);
        }
        parser.finish(&mut events);
        events.iter().for_each(|event| reply.add(event));
        let _ = reply.into_message(|i| i.to_string());
    }
}

fn json(_: &World, bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    for dialect in [Dialect::Strict, Dialect::Python] {
        let Ok(value) = Json::parse(text, dialect) else { continue };
        let printed = value.dump(Separators::COMPACT);
        let again = Json::parse(&printed, Dialect::Python);
        assert_eq!(again.as_ref(), Ok(&value), "what was printed reads as the same value");
        let _ = value.sorted();
    }
}
