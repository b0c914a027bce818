//! Runs a program in its own process group, to kill it with all its children.

use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Interval at which a wait checks the clock and signals.
const TICK: Duration = Duration::from_millis(100);

/// A running process group, killed on drop.
pub struct ProcessGroup {
    /// The program, whose process id is also the group's; `None` after the wait for it.
    leader: Option<Child>,
    output: Receiver<io::Result<Chunk>>,
}

/// What a program has written.
pub struct Chunk {
    /// Whether it is from the standard error.
    pub is_error: bool,
    pub bytes: Vec<u8>,
}

/// How a group ended.
#[derive(Debug)]
pub enum End {
    /// The program exited.
    Exit(ExitStatus),
    /// The deadline passed, and the group was killed.
    Killed,
}

impl ProcessGroup {
    /// Starts `command` with its standard output and error piped to [`run`](Self::run).
    pub fn spawn(mut command: Command) -> Result<Self> {
        // The terminal's Ctrl-C signals only this process's group: `run` then kills the child's.
        interrupted()?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.process_group(0);
        let program = command.get_program().to_string_lossy().into_owned();
        let mut child = command.spawn().with_context(|| format!("{program} does not start"))?;
        let pipes = child.stdout.take().zip(child.stderr.take());
        let (sender, output) = sync_channel(16);
        let group = Self { leader: Some(child), output };
        let (stdout, stderr) = pipes.context("the output was not piped")?;
        forward(stdout, false, sender.clone());
        forward(stderr, true, sender);
        Ok(group)
    }

    /// Passes output to `on_output`, which also sets the deadline, until the program has exited and
    /// the pipes are closed, or the deadline has passed. An error, including a signal to this
    /// process, kills the group.
    pub fn run(
        mut self,
        mut deadline: Option<Instant>,
        mut on_output: impl FnMut(&Chunk) -> Result<Option<Instant>>,
    ) -> Result<End> {
        let mut open = true;
        loop {
            if open {
                match self.output.recv_timeout(TICK) {
                    Ok(chunk) => {
                        let chunk = chunk.context("cannot read the output")?;
                        deadline = on_output(&chunk)?;
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => open = false,
                }
            } else if let Some(status) = self.try_wait()? {
                return Ok(End::Exit(status));
            } else {
                thread::sleep(TICK);
            }
            if interrupted()?.load(Ordering::Relaxed) {
                bail!("interrupted");
            }
            if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                return Ok(End::Killed);
            }
        }
    }

    fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        // `run` returns after the wait, and does not come here again.
        let Some(leader) = &mut self.leader else { return Ok(None) };
        let status = leader.try_wait().context("cannot wait for the program")?;
        if status.is_some() {
            self.leader = None;
        }
        Ok(status)
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        let Some(mut leader) = self.leader.take() else { return };
        if let Ok(group) = libc::pid_t::try_from(leader.id()) {
            // SAFETY: the call takes two numbers. The leader has not been waited for, so no other
            // process has its id or group.
            unsafe { libc::killpg(group, libc::SIGKILL) };
        }
        let _ = leader.wait();
    }
}

/// Sends the chunks that are read from a pipe.
fn forward(
    mut pipe: impl Read + Send + 'static,
    is_error: bool,
    to: SyncSender<io::Result<Chunk>>,
) {
    // The thread is never joined: a process that left the group may keep the pipe open.
    thread::spawn(move || {
        loop {
            let mut bytes = vec![0; 1 << 16];
            let length = pipe.read(&mut bytes);
            let last = !matches!(length, Ok(length) if length > 0);
            let read = length.map(|length| {
                bytes.truncate(length);
                Chunk { is_error, bytes }
            });
            if to.send(read).is_err() || last {
                return;
            }
        }
    });
}

/// Returns whether this process got a termination signal. The first call disables their default
/// action. No other data depends on the flag, so that relaxed loads are enough.
fn interrupted() -> Result<&'static AtomicBool> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    if let Some(flag) = FLAG.get() {
        return Ok(flag);
    }
    let flag = FLAG.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(flag))
            .context("cannot watch for signals")?;
    }
    Ok(flag)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> ProcessGroup {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        ProcessGroup::spawn(command).unwrap()
    }

    /// Returns whether the process runs: it exists and is not a zombie.
    fn is_running(id: &str) -> bool {
        let state = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        state.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
    }

    #[test]
    fn the_whole_output_comes_before_the_end() {
        let mut outputs = [Vec::new(), Vec::new()];
        let take = |chunk: &Chunk| {
            outputs[usize::from(chunk.is_error)].extend_from_slice(&chunk.bytes);
            Ok(None)
        };
        let end = shell("echo one; echo 1 >&2; sleep 0.1; printf two; exit 3").run(None, take);
        assert!(matches!(end, Ok(End::Exit(status)) if status.code() == Some(3)));
        assert_eq!(outputs, [&b"one\ntwo"[..], b"1\n"]);
    }

    #[test]
    fn no_process_of_a_group_outlives_the_deadline() {
        let mut output = String::new();
        let deadline = Instant::now() + Duration::from_millis(500);
        let take = |chunk: &Chunk| {
            output.push_str(&String::from_utf8_lossy(&chunk.bytes));
            Ok(Some(deadline))
        };
        // A program whose child keeps running.
        let end = shell("sleep 600 & echo $!; wait").run(Some(deadline), take);
        assert!(matches!(end, Ok(End::Killed)), "{end:?}");
        let child = output.trim();
        assert!(!child.is_empty());
        // The kernel needs a moment to kill it.
        for _ in 0..100 {
            if !is_running(child) {
                return;
            }
            thread::sleep(TICK);
        }
        panic!("process {child} still runs");
    }

    #[test]
    fn an_error_ends_the_group() {
        let started = Instant::now();
        let end = shell("echo; sleep 600").run(None, |_| bail!("enough"));
        assert_eq!(end.unwrap_err().to_string(), "enough");
        assert!(started.elapsed() < Duration::from_secs(60));
    }
}
