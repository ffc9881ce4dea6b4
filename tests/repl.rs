//! `k3-run chat` and `generate` as people and scripts use them.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::support::{demo_container, program};

/// The demo model and a place for files.
struct Demo(TempDir);

impl Demo {
    fn new() -> Self {
        Self(demo_container())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn chat(&self, args: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.arg("chat").arg(self.path("container")).args(args);
        command.args(["--no-history", "--no-usage"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// What comes out when `input` goes in.
    fn say(&self, args: &[&str], input: &str) -> Output {
        let mut child = self.chat(args).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    }
}

const GREEDY: [&str; 4] = ["--temperature", "0", "-n", "40"];

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn lines_in_answers_out() {
    let demo = Demo::new();
    let saved = demo.path("saved");
    let saved = saved.to_str().unwrap();
    let input = format!(
        "\n/think off\nGood morning.\\\nWho lives at Longbourn?\n/retry\n/save {saved}\n\
         /effort low\n/stats\n/quit\nnever read\n"
    );
    let out = demo.say(&GREEDY, &input);
    let (answers, talk) = (text(&out.stdout), text(&out.stderr));
    assert!(out.status.success(), "{talk}");
    assert!(!answers.contains(['\x1b', '\r']) && !talk.contains(['\x1b', '\r']), "{talk}");
    let (first, again) = answers.split_at(answers.len() / 2);
    assert!(first.len() > 20 && first.ends_with('\n'), "{answers}");
    assert_eq!(first, again, "the same question has the same greedy answer");
    let prompts: Vec<&str> = talk.split("; prompt: ").skip(1).collect();
    let words: Vec<&str> = prompts[1].split([' ', ',', ';']).collect();
    assert_eq!((words[0], words[4]), (words[3], "known"), "all of the prompt was known");
    assert!(talk.contains("saved ") && talk.contains("thinking"), "{talk}");
    assert!(talk.contains("gone back to 1 times"), "{talk}");

    // Another process goes on.
    let load = [&GREEDY[..], &["--load", saved, "--save", saved]].concat();
    let out = demo.say(&load, "/retry\n/system Be brief.\n/system\n");
    let talk = text(&out.stderr);
    assert!(out.status.success(), "{talk}");
    assert_eq!(text(&out.stdout), first);
    assert!(talk.contains("loaded 1 turns") && talk.contains("\nBe brief.\n"), "{talk}");
    assert!(talk.trim_end().ends_with(saved), "{talk}");

    // Reasoning is no result.
    let out = demo.say(&GREEDY, "Who lives at Longbourn?\n");
    assert!(out.status.success() && out.stdout.len() <= first.len(), "{}", text(&out.stdout));
}

#[test]
fn a_script_learns_what_went_wrong() {
    let demo = Demo::new();
    let fail = |args: &[&str], input: &str, problem: &str| {
        let out = demo.say(args, input);
        let talk = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{talk}");
        assert!(talk.contains(problem), "{talk}");
    };
    fail(&[], "/fly\n", "error: there is no command /fly");
    fail(&[], "/load\n", "error: /load needs a file name");
    fail(&["--context", "30"], "Good morning.\n", "do not fit into a context of 30");
    fail(&["--load", "/nowhere"], "", "error: /nowhere: no such file");
    fail(&["--temperature", "9"], "Good morning.\n", "temperature");
    let container = demo.path("container/manifest.json");
    let save = format!("/load {}\n", container.display());
    fail(&[], &save, "manifest.json: not a session file");
    // A reader that has gone is no failure.
    let mut child = demo.chat(&["--effort", "none", "-n", "400"]).spawn().unwrap();
    let (mut stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    stdin.write_all(b"Tell me more.\nTell me more.\n").unwrap();
    drop((stdin, stdout));
    let mut talk = String::new();
    child.stderr.take().unwrap().read_to_string(&mut talk).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{talk}");
}

/// Runs `generate` and returns the ids that it prints, and what it says.
fn generate(demo: &Demo, args: &[&str]) -> (Vec<String>, String) {
    let out = generating(demo, args).output().unwrap();
    let talk = text(&out.stderr).to_owned();
    assert!(out.status.success(), "{talk}");
    (text(&out.stdout).lines().map(str::to_owned).collect(), talk)
}

fn generating(demo: &Demo, args: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.arg("generate").arg(demo.path("container")).args(["--print", "ids", "--no-usage"]);
    command.args(args);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn a_text_goes_on_in_another_process() {
    let demo = Demo::new();
    let saved = demo.path("saved");
    let saved = saved.to_str().unwrap();
    let (whole, talk) = generate(&demo, &["--ids", "9,10,11", "-n", "40"]);
    assert!(whole.len() > 30 && !talk.contains("guesses"), "{talk}");
    let (first, talk) = generate(&demo, &["--ids", "9,10,11", "-n", "12", "--save", saved]);
    assert!(talk.contains(&format!("saved 15 tokens to {saved}")), "{talk}");
    assert_eq!(first, whole[..12]);
    // Without a prompt the text goes on, guesses or not, and nothing is computed again.
    for guesses in ["0", "6"] {
        let args = ["--load", saved, "-n", "28", "--speculate", guesses];
        let (rest, talk) = generate(&demo, &args);
        assert_eq!(rest, whole[12..], "{guesses}");
        assert!(talk.contains("prompt 0 tokens"), "{talk}");
    }
    // A prompt goes behind what was loaded.
    let (behind, _) = generate(&demo, &["--load", saved, "--ids", "20,21", "-n", "10"]);
    let ids = format!("9,10,11,{},20,21", first.join(","));
    assert_eq!(behind, generate(&demo, &["--ids", &ids, "-n", "10"]).0);

    let refused = |args: &[&str], problem: &str| {
        let out = generating(&demo, args).output().unwrap();
        let talk = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{talk}");
        assert!(talk.contains(problem), "{talk}");
    };
    refused(&["--load", saved, "--act8", "on"], "saved: the session was made with --act8 experts");
    refused(&["--load", saved, "--context", "9"], "do not fit into a context of 9");
    refused(&["--load", "/nowhere"], "/nowhere: no such file");
    refused(&["-n", "3"], "--prompt <TEXT>");
}

#[test]
fn a_text_that_is_stopped_is_kept() {
    let demo = Demo::new();
    let saved = demo.path("saved");
    let saved = saved.to_str().unwrap();
    let slow = ["--ids", "9,10,11", "-n", "1500", "--expert-cache", "0", "--threads", "1"];
    let mut child = generating(&demo, &[&slow[..], &["--save", saved]].concat()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut first: Vec<String> = lines.by_ref().take(5).map(Result::unwrap).collect();
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    first.extend(lines.map(Result::unwrap));
    let mut talk = String::new();
    child.stderr.take().unwrap().read_to_string(&mut talk).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{talk}");
    let count = first.len();
    assert!(count < 1400 && talk.contains(&format!("saved {} tokens", 3 + count)), "{talk}");
    let (rest, talk) = generate(&demo, &["--load", saved, "-n", "5"]);
    assert!(talk.contains("prompt 0 tokens"), "{talk}");
    let all = (count + 5).to_string();
    assert_eq!([first, rest].concat(), generate(&demo, &["--ids", "9,10,11", "-n", &all]).0);
}

/// A terminal with a chat in it.
struct Terminal {
    socket: PathBuf,
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}

impl Terminal {
    fn open(socket: &Path, command: &str) -> Self {
        let terminal = Self { socket: socket.to_owned() };
        let size = ["-x", "100", "-y", "30"];
        let args = [&["new-session", "-d"][..], &size, &[command]].concat();
        terminal.tmux(&args);
        terminal
    }

    fn tmux(&self, args: &[&str]) -> String {
        let mut tmux = Command::new("tmux");
        tmux.arg("-S").arg(&self.socket).args(["-u", "-f", "/dev/null"]).args(args);
        let output = tmux.env_remove("TMUX").env_remove("NO_COLOR").output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn keys(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys"], keys].concat());
    }

    fn line(&self, text: &str) {
        self.tmux(&["send-keys", "-l", text]);
        self.keys(&["Enter"]);
    }

    /// All that was shown so far, wrapped lines joined.
    fn shown(&self) -> String {
        self.tmux(&["capture-pane", "-p", "-J", "-S", "-"])
    }

    /// Waits until what is shown satisfies `wanted`.
    fn wait(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        let began = Instant::now();
        loop {
            let shown = self.shown();
            if wanted(&shown) {
                return shown;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "no {what} in:\n{shown}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn a_chat_in_a_terminal() {
    if Command::new("tmux").arg("-V").output().is_err() {
        let _ = writeln!(std::io::stderr(), "skipped: there is no tmux");
        return;
    }
    let demo = Demo::new();
    let (program, dir) = (program(), demo.0.path().display());
    // One expert in memory and one thread, so that there is time to interrupt.
    let command = format!(
        "env XDG_STATE_HOME={dir}/state K3_NO_USAGE=1 '{}' chat {dir}/container --effort none -n 1500 --chunk 2 \
         --temperature 0 --expert-cache 0 --threads 1; echo left with $?; sleep 100",
        program.display()
    );
    let terminal = Terminal::open(&demo.path("tmux"), &command);
    terminal.wait("prompt", |shown| shown.trim_end().ends_with('>'));

    // An answer that would go on for long is stopped; the session is kept.
    terminal.line("Tell me more.");
    terminal.wait("answer", |shown| shown.matches("I have ").count() > 3);
    terminal.keys(&["C-c"]);
    terminal.wait("stop", |shown| shown.contains("stopped; ") && shown.trim_end().ends_with('>'));

    // So is a prompt, while a line tells how far it is.
    let long = "It is a truth universally acknowledged. ".repeat(40);
    terminal.line(&format!("\"\"\"{long}"));
    terminal.line("And so on.\"\"\"");
    terminal.wait("live line", |shown| {
        shown.lines().any(|l| l.starts_with("reading ") && l.ends_with(" left"))
    });
    terminal.keys(&["C-c"]);
    let shown = terminal.wait("stop", |shown| shown.contains("tokens; /retry goes on"));
    assert!(!shown.contains("reading "), "the live line is gone: {shown}");
    let words: Vec<&str> = shown.rsplit_once("stopped at ").unwrap().1.split(' ').collect();
    let (stopped, total): (usize, usize) = (words[0].parse().unwrap(), words[2].parse().unwrap());
    assert!(stopped > 0 && stopped < total);

    // It goes on where it was.
    terminal.line("/retry");
    let shown = terminal.wait("summary", |shown| shown.matches(" known, ").count() == 2);
    let known = shown.rsplit_once(" known, ").unwrap().0.rsplit_once(' ').unwrap().1;
    assert_eq!(known.parse::<usize>().unwrap(), stopped);

    // History comes back by arrow, commands complete by tab, Ctrl-C at the prompt is mild.
    terminal.keys(&["Up", "C-c"]);
    terminal.wait("the line before and a hint", |shown| {
        shown.contains("> /retry\nCtrl-D or /quit leaves")
            || shown.contains("> /retry\n\nCtrl-D or /quit leaves")
    });
    terminal.keys(&["/sta", "Tab", "Enter"]);
    terminal.wait("statistics", |shown| shown.contains("checkpoints  "));

    // Another process goes on from what was saved.
    terminal.line(&format!("/save {dir}/saved"));
    let shown = terminal.wait("receipt", |shown| shown.contains("saved "));
    let saved = shown.rsplit_once("saved ").unwrap().1.split(' ').next().unwrap();
    terminal.keys(&["C-d"]);
    terminal.wait("end", |shown| shown.contains("left with 0"));
    let next = Terminal::open(&demo.path("tmux-next"), &command);
    next.wait("prompt", |shown| shown.trim_end().ends_with('>'));
    next.line(&format!("/load {dir}/saved"));
    next.wait("receipt", |shown| shown.contains(&format!("loaded 2 turns, {saved} tokens")));
    next.line("Who lives at Longbourn?");
    next.wait("answer", |shown| shown.contains("I "));
    next.keys(&["C-c"]);
    let shown = next.wait("summary", |shown| shown.contains(" known, "));
    let known = shown.rsplit_once(" known, ").unwrap().0.rsplit_once(' ').unwrap().1;
    assert_eq!(known, saved, "nothing of the saved conversation is computed again");
    next.keys(&["C-d"]);
    next.wait("end", |shown| shown.contains("left with 0"));

    let history = fs::read_to_string(demo.path("state/k3-run/history")).unwrap();
    assert!(history.contains("Tell me more.") && history.contains("And so on."), "{history}");
}
