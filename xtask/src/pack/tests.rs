//! Tests of packs and of their script.

use super::*;

#[test]
fn sizes_are_read_with_their_units() {
    assert_eq!(parse_size("64M"), Ok(64 * MIB));
    assert_eq!(parse_size("1G"), Ok(1024 * MIB));
    assert_eq!(parse_size("512K"), Ok(MIB / 2));
    assert_eq!(parse_size("100"), Ok(100));
    for bad in ["", "M", "64MB", "-1", "99999999999999G"] {
        parse_size(bad).unwrap_err();
    }
}

#[test]
fn a_pack_s_network_is_the_plugin_in_it() {
    let script = format!("programs='/a pack'\n{}env", network_sh());
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let plugin = Path::new("/a pack/lib/libdevcomm_rma_loopback.so");
    for (name, value) in devcomm_locate::gin_loopback_environment(plugin) {
        let line = format!("{name}={value}");
        assert!(text.lines().any(|found| found == line), "{line} is not in:\n{text}");
    }
}

#[test]
fn a_packed_program_runs_by_itself_or_under_a_tool() {
    let folder = tempfile::tempdir().unwrap();
    let (programs, pack) = (folder.path().join("programs"), folder.path().join("pack"));
    let example = programs.join("examples/sums");
    fs::create_dir_all(example.parent().unwrap()).unwrap();
    fs::write(&example, "#!/bin/sh\necho \"$@\"\n").unwrap();
    fs::set_permissions(&example, fs::Permissions::from_mode(0o755)).unwrap();
    copy_into(&archive(&programs).unwrap(), &pack.join("programs.tar.xz")).unwrap();
    let script = pack.join("run.sh");
    fs::write(&script, RUN_SH).unwrap();
    let run = |args: &[&str]| {
        let mut command = Command::new("sh");
        command.arg(&script).args(args).env("DEVCOMM_CACHE", folder.path().join("cache"));
        let output = command.env("DEVCOMM_NCCL_HOME", "/nowhere").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(run(&["list"]), "sums\ntests\nbench\n");
    assert_eq!(run(&["sums", "-b", "two words"]), "-b two words\n");
    // A program may write next to itself; a truncated program is unpacked again.
    let packed = folder.path().join("cache/packed");
    let unpacked = || {
        let mut all = fs::read_dir(&packed).unwrap().map(|entry| entry.unwrap().path());
        let found = all.next().unwrap();
        assert_eq!(all.next(), None);
        found.join("examples")
    };
    fs::write(unpacked().join("log"), "").unwrap();
    assert_eq!(run(&["list"]), "log\nsums\ntests\nbench\n");
    fs::write(unpacked().join("sums"), "#!/bin/sh\n").unwrap();
    assert_eq!(run(&["sums", "-b"]), "-b\n");
    fs::remove_file(unpacked().join("sums")).unwrap();
    assert_eq!(run(&["sums", "-b"]), "-b\n");
    // The tool gets the program's path and arguments.
    let shown = run(&["--with", "printf %s|", "sums", "-b", "two words"]);
    assert!(shown.ends_with("/examples/sums|-b|two words|"), "{shown}");
    // Without a cache it runs from a temporary folder, and removes that one only.
    let [temporary, other] = ["my tmp", "my"].map(|name| folder.path().join(name));
    [&temporary, &other].into_iter().for_each(|folder| fs::create_dir(folder).unwrap());
    let mut command = Command::new("sh");
    command.arg(&script).arg("list").env("DEVCOMM_CACHE", &script).env("TMPDIR", &temporary);
    let output = command.output().unwrap();
    assert!(output.status.success() && output.stdout.starts_with(b"sums\n"), "{output:?}");
    assert!(other.exists());
    let relative = command.env("DEVCOMM_CACHE", "cache").output().unwrap();
    assert!(!relative.status.success());
    assert!(
        String::from_utf8_lossy(&relative.stderr).contains("DEVCOMM_CACHE=cache is a relative")
    );
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0);
}

#[test]
fn a_folder_that_no_pack_made_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    ensure_replaceable(&folder.path().join("new")).unwrap();
    ensure_replaceable(folder.path()).unwrap();
    fs::write(folder.path().join("thesis.tex"), "").unwrap();
    ensure_replaceable(folder.path()).unwrap_err();
    fs::write(folder.path().join(MARKER), "").unwrap();
    ensure_replaceable(folder.path()).unwrap();
}
