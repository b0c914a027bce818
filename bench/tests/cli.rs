//! The benchmarks' command line: refusals and help.

mod program;

use std::fs;
use std::io::Write;

use program::{refuses, run};

/// Returns an empty folder like that of `cargo xtask twins`.
fn empty_twins() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for language in ["rust", "cpp"] {
        fs::create_dir(folder.path().join(language)).unwrap();
    }
    folder
}

/// The benchmarks whose common flags are tested.
const BENCHMARKS: [&str; 6] =
    ["twins", "all-reduce", "all-gather", "barrier", "put", "gemm-allreduce"];

/// The benchmarks with message sizes.
const WITH_MESSAGES: [&str; 4] = ["twins", "all-reduce", "all-to-all", "put"];

#[test]
fn invalid_flags_are_refused() {
    for bench in BENCHMARKS {
        refuses(&[bench, "-n", "0"], &["-n 0"]);
        refuses(&[bench, "-n", "-3"], &["-3"]);
        refuses(&[bench, "--rounds", "0"], &["--rounds 0"]);
        refuses(&[bench, "--frequency", "7"], &["unexpected argument"]);
    }
    for bench in WITH_MESSAGES {
        refuses(&[bench, "-b", "1M", "-e", "8K"], &["-b 1048576 is above -e 8192"]);
        refuses(&[bench, "-f", "1"], &["-f must be at least 2, not 1"]);
        refuses(&[bench, "-i", "0"], &["-i must be at least 1, not 0"]);
        refuses(&[bench, "-i", "8", "-f", "2"], &["cannot be used with"]);
        refuses(&[bench, "-b", "8KB"], &["not a size"]);
    }
    for bench in ["twins", "all-reduce", "broadcast"] {
        refuses(&[bench, "-d", "int8"], &["invalid value", "bf16"]);
    }
    for bench in ["twins", "all-reduce", "barrier", "put"] {
        refuses(&[bench, "--threads", "2000"], &["1 to 1024"]);
        refuses(&[bench, "--blocks", "0"], &["at least one block"]);
    }
    for (flag, value, refused, why) in [
        ("-t", "2", "-t (--nthreads) 2", "-g counts all ranks"),
        ("--agg_iters", "4", "-m (--agg_iters) 4", "by -n"),
        ("-R", "2", "-R (--local_register) 2", "nccl-sym is -R 2"),
        ("-J", "rows.json", "-J (--output_file) rows.json", "--json writes"),
    ] {
        refuses(&["all-reduce", flag, value], &["no meaning here", refused, why]);
    }
    refuses(&["barrier", "--nccl-tests"], &["nccl-tests has no table of barrier"]);
    refuses(&["all-reduce", "--nccl-tests", "rust"], &["--nccl-tests rust: only rust-ops"]);
    refuses(&["barrier", "-b", "8"], &["unexpected argument"]);
    refuses(&["put", "-d", "f32"], &["unexpected argument"]);
    refuses(&["signal", "-b", "8"], &["unexpected argument"]);
    refuses(&["rmsnorm-allreduce", "--tokens", "1,0"], &["a message has a token"]);
    refuses(&["gemm-allreduce", "--blocks", "7"], &["unexpected argument"]);
    refuses(&["gemm-allreduce", "--m", "0"], &["0 x", "is empty"]);
    refuses(&["gemm-allreduce", "--k", "12"], &["--k 12", "a multiple of 8"]);
    refuses(&["twins", "no_such_kernel"], &["no pair `no_such_kernel`", "lsa_allreduce"]);
    // In nccl-tests `all` runs every reduction.
    for op in ["prod", "all"] {
        refuses(&["all-reduce", "-o", op], &[&format!("invalid value '{op}'"), "sum"]);
    }
    refuses(&["rmsnorm-allreduce", "-d", "e4m3"], &["no variant runs", "f32, f16 and bf16"]);
    refuses(&["twins", "-d", "i32"], &["no variant runs: twins has the types f32, f16"]);
    refuses(&["gemm", "--k", "0"], &["is empty"]);
    refuses(&["gemm-ladder", "--m", "300"], &["m is 300", "multiples of 256"]);
    refuses(&["gemm", "--k", "24", "-d", "e4m3"], &["--k 24", "multiple of 16"]);
    refuses(&["gemm", "-d", "int8"], &["invalid value", "e5m2"]);
    refuses(&["gemm", "--scales", "1,2"], &["only 8-bit floats have scales"]);
    for scales in ["3,1", "2", "1,2,4", "0,1"] {
        refuses(&["gemm", "-d", "e4m3", "--scales", scales], &["--scales [", "powers of two"]);
    }
    refuses(&["launch", "--host", "-G", "1"], &["cannot be used with"]);
    refuses(&["gemm", "--plan", "tall"], &["`tall` is no plan"]);
    refuses(&["gemm", "--plan", "wide", "-d", "f16"], &["only products of bf16"]);
    refuses(&["lotteries"], &["unrecognized subcommand"]);
}

#[test]
fn unknown_variants_are_refused_with_a_list_of_the_known_ones() {
    refuses(&["all-reduce", "--variants", "rust,mpi"], &["invalid value 'mpi'", "nccl-sym"]);
    refuses(&["all-reduce", "--variants", "rust-lsa"], &["no variant `rust-lsa`", "nccl-sym"]);
    refuses(&["barrier", "--variants", "rust-lsa"], &["barrier has no variant `rust-lsa`"]);
    let simulated = ["all-reduce", "--simulate", "2", "--variants"];
    refuses(&[&simulated[..], &["rust,cpp"]].concat(), &["cpp cannot run", "simulator"]);
    let simulated = ["gemm-allreduce", "--simulate", "2", "--variants", "nccl"];
    refuses(&simulated, &["nccl cannot run", "cuBLASLt"]);
}

#[test]
fn peers_that_would_do_other_work_are_refused() {
    let peers = |bench: &str, peer: &str, more: &[&str], why: &str| {
        let args = [&[bench, "--simulate", "2", "--peers", peer], more].concat();
        refuses(&args, &[&format!("--peers {peer}: it cannot run with {why}")]);
    };
    for peer in ["torch", "flashinfer", "nccl-tests"] {
        peers("all-reduce", peer, &["-o", "max"], "another -o than sum");
        peers("all-reduce", peer, &["-d", "e4m3"], "another -d than f32, f16 and bf16");
        peers("all-reduce", peer, &["--beside", "8,8,8"], "--beside");
        peers("all-reduce", peer, &["--host"], "--host");
    }
    peers("rmsnorm-allreduce", "flashinfer", &["--quantised"], "--quantised");
    refuses(&["all-gather", "--peers", "torch"], &["all-gather has no variant of torch"]);
}

#[test]
fn what_cannot_be_tuned_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("plans.txt");
    fs::write(&table, "# Plans.\n64 512 8 tall\n").unwrap();
    let table = table.to_str().unwrap();
    refuses(
        &["tune", "gemm", "--table", table],
        &[table, "no table of plans", "`tall` is no plan"],
    );
    refuses(&["tune", "gemm", "--table", folder.path().to_str().unwrap()], &["cannot read"]);
    refuses(&["tune", "gemm", "--set", "decode", "--m", "8"], &["cannot be used with"]);
    refuses(&["tune", "gemm", "--m", "0"], &["is empty"]);
    refuses(&["tune", "gemm", "-n", "0"], &["-n 0"]);
    for flag in ["--between", "--in-place", "--nccl=zero"] {
        refuses(&["tune", "all-gather", flag], &["leave out --nccl, --in-place, --between"]);
    }
    refuses(&["tune", "all-reduce", "-d", "e4m3"], &["no variant runs: tune has the types"]);
    refuses(&["tune", "gemm", "-d", "f16"], &["only products of bf16"]);
    refuses(&["tune", "gemm", "--missing"], &["--table <FILE>"]);
    refuses(&["tune", "gemm", "--simulate", "1"], &["unexpected argument '--simulate'"]);
    refuses(&["tune", "barrier"], &["unrecognized subcommand 'barrier'"]);
}

#[test]
fn the_model_of_two_gpus_predicts_other_runs_within_15_percent() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/measurements");
    let file = |name: &str| format!("{folder}/{name}-graph.json");
    let predicts = |fit: &str, measured: &str, variants: &str| {
        let args = ["--fit", &file(fit), "--within", "15", "--variants", variants];
        let (code, stdout, stderr) = run(&[&["model", &file(measured)][..], &args].concat());
        assert_eq!(code, Some(0), "{stdout}{stderr}");
        assert!(stdout.contains("# error of the model: median"), "{stdout}");
    };
    predicts("all-reduce-2xh200-f32", "all-reduce-2xh200-bf16", "rust-ops,nccl");
    predicts("all-reduce-2xh200-f32", "reduce-scatter-2xh200", "rust-ops");
    predicts("all-gather-2xh200", "all-to-all-2xh200", "rust-ops");
    // The model also predicts four GPUs, for NCCL only if it has the same settings in both runs.
    predicts("all-reduce-2xh200-f32", "all-reduce-4xh200-f32", "rust-ops");
    predicts("all-reduce-2xh200-f32", "all-reduce-4xh200-bf16", "rust-ops");
    predicts("all-reduce-2xh100-f32", "all-reduce-4xh100-f32", "nccl");
    predicts("reduce-scatter-2xh200", "reduce-scatter-4xh200", "rust-ops");
    let (code, _, stderr) = run(&["model", &file("all-reduce-2xh200-f32"), "--within", "0.01"]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("% off, which is more than 0.01 %"), "{stderr}");
}

#[test]
fn what_cannot_be_modelled_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let rows_of = |name: &str, ranks| {
        let header = format!(r#""command": ["devcomm-bench", "{name}"], "ranks": {ranks}"#);
        let row = r#""size": 0, "count": 0, "type": "-", "redop": "-", "variant": "rust-ops""#;
        format!(r#"{{"header": {{{header}, "lsa_ranks": 1}}, "rows": [{{{row}}}]}}"#)
    };
    refuses(&["model"], &["required"]);
    refuses(&["model", "x.json", "--variants", "cpp"], &["the model knows rust-ops, nccl"]);
    refuses(&["model", "/no/such/rows.json"], &["cannot read /no/such/rows.json"]);
    refuses(&["model", &file("text", "rows")], &["is not what --json of this version writes"]);
    refuses(&["model", &file("gemm", &rows_of("gemm", 1))], &["is of no collective"]);
    refuses(&["model", &file("four", &rows_of("all-reduce", 4))], &["is of 4 ranks"]);
    refuses(&["model", &file("one", &rows_of("all-reduce", 1))], &["is of one rank"]);
    refuses(&["model", &file("none", &rows_of("all-reduce", 2))], &["none of these collectives"]);
    let four = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../docs/measurements/all-reduce-4xh200-bf16-graph.json"
    );
    refuses(&["model", four], &["the model is fitted to two ranks, not 4"]);
}

#[test]
fn without_compiled_twins_it_says_how_to_get_them() {
    refuses(&["twins", "--twins", "/no/such/folder"], &["/no/such/folder", "cargo xtask twins"]);
}

#[test]
fn a_job_has_a_rank() {
    let folder = empty_twins();
    refuses(
        &["twins", "--twins", folder.path().to_str().unwrap(), "-g", "0"],
        &["at least one rank"],
    );
    refuses(&["all-reduce", "-g", "0"], &["at least one rank"]);
    refuses(&["all-reduce", "--simulate", "0"], &["at least one rank"]);
    refuses(&["all-reduce", "--simulate", "2", "-g", "2"], &["cannot be used with"]);
}

#[test]
fn a_machine_without_a_gpu_is_told_so() {
    let Err(reason) = devcomm::visible_gpus() else {
        // This is written to stdout, as the test harness would capture `println!`.
        let name = "a_machine_without_a_gpu_is_told_so";
        let _ = writeln!(std::io::stdout(), "SKIPPED {name}: this machine has a GPU");
        return;
    };
    let (reason, folder) = (reason.to_string(), empty_twins());
    let twins = ["twins", "--twins", folder.path().to_str().unwrap()];
    refuses(&twins, &[&reason]);
    refuses(&[&twins[..], &["-g", "2", "--processes"]].concat(), &[&reason]);
    for bench in &BENCHMARKS[1..] {
        refuses(&[bench], &[&reason, "`--simulate N`"]);
        refuses(&[bench, "-g", "2", "--processes"], &[&reason]);
    }
}

#[test]
fn the_help_names_every_flag_of_nccl_tests_that_is_kept() {
    let all = ["-n, --iters", "-w, --warmup_iters", "-c, --check"];
    let all =
        [&all[..], &["-g, --ngpus", "-G, --cudagraph", "-T, --timeout", "--gin-loopback"]].concat();
    let message_flags = ["-b, --minbytes", "-e, --maxbytes", "-f, --stepfactor", "-i, --stepbytes"];
    let helps = |bench: &str, flags: &[&str]| {
        let (code, stdout, _) = run(&[bench, "--help"]);
        assert_eq!(code, Some(0));
        for flag in flags {
            assert!(stdout.contains(flag), "{bench} {flag}: {stdout}");
        }
    };
    BENCHMARKS.iter().for_each(|bench| helps(bench, &all));
    WITH_MESSAGES.iter().for_each(|bench| helps(bench, &message_flags));
    helps("all-reduce", &["-d, --datatype", "-o, --op"]);
    let (_, stdout, _) = run(&["--help"]);
    assert!(stdout.contains("nccl-tests, except"), "{stdout}");
    assert!(stdout.contains("have no meaning here are refused"), "{stdout}");
}

#[test]
fn the_help_says_which_blocks_run_by_default() {
    let helps = |bench: &str, default: &str| {
        let (code, stdout, _) = run(&[bench, "--help"]);
        assert_eq!(code, Some(0));
        let text = stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        let blocks = format!("Blocks of a kernel [default: {default}");
        assert!(text.contains(&blocks), "{bench}: {stdout}");
    };
    ["all-reduce", "put", "p2p"].iter().for_each(|bench| helps(bench, "chosen by size]"));
    helps("barrier", "1, then 16, then 64;");
    helps("twins", "chosen by size; of `lsa_barrier` 1, then 16, then 64]");
}
