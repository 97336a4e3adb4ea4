//! Bad input: one line names it and a solution, the exit code is 1, nothing is overwritten.

use crate::place::*;
use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use tch::{Kind, Tensor};

#[test]
fn refuses_unusable_texts() {
    let place = Place::trained();
    let latin1 = [sample_text().as_bytes(), b"caf\xe9"].concat();
    let position = format!("byte {}", latin1.len() - 1);
    let cases: [(PathBuf, &[&str]); 7] = [
        (place.path("missing.txt"), &["missing.txt", "No such file", "--text"]),
        (place.out(), &["is a folder", "give a text file"]),
        (place.write("empty.txt", ""), &["empty.txt is empty", "longer"]),
        (place.write("one.txt", "x"), &["'x' only", "several characters"]),
        (place.write("same.txt", "x".repeat(5000)), &["'x' only", "several characters"]),
        (
            place.write("short.txt", "ab".repeat(30)),
            &["too short", "60 characters", "need 72", "--batch 4"],
        ),
        (place.write("latin1.txt", latin1), &["not UTF-8", &position, "iconv"]),
    ];
    for (file, expected) in cases {
        place.refuses(&["--text", str(&file)], expected);
    }
}

#[test]
fn the_shortest_text_it_asks_for_is_enough() {
    let place = Place::new();
    let enough = place.write("enough.txt", "ab".repeat(36));
    succeeded(&place.run(&["--text", str(&enough), "--op", "fused", "--steps", "2"]));
}

#[test]
fn refuses_an_unreadable_text() {
    let place = Place::trained();
    let file = place.write("secret.txt", sample_text());
    fs::set_permissions(&file, Permissions::from_mode(0o000)).unwrap();
    if File::open(&file).is_ok() {
        eprintln!("skipped: this user may read everything");
        return;
    }
    place.refuses(&["--text", str(&file)], &["secret.txt", "Permission denied", "--text"]);
}

#[test]
fn refuses_an_unusable_output_folder() {
    let place = Place::trained();
    let file = place.write("file", "kept");
    place.refuses(&["--out", str(&file)], &["file is not a folder", "give another"]);
    // In the last two, nobody can create files, not even root.
    for out in [str(&file.join("below")), "/proc/char_lltm", "/proc"] {
        place.refuses(&["--out", out], &["cannot write to --out", out, "may write"]);
    }
    assert_eq!(fs::read(file).unwrap(), b"kept");
}

#[test]
fn refuses_a_read_only_output_folder() {
    let place = Place::trained();
    fs::set_permissions(place.out(), Permissions::from_mode(0o555)).unwrap();
    if File::create(place.path("out/probe")).is_ok() {
        eprintln!("skipped: this user may write everywhere");
        return;
    }
    place.refuses(&[], &["cannot write to --out", "may write"]);
    fs::set_permissions(place.out(), Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn refuses_when_a_folder_lies_where_a_file_goes() {
    let place = Place::new();
    fs::create_dir_all(place.out().join("loss.csv")).unwrap();
    assert_message(&place.run(&[]), &["loss.csv is in the way", "--out"]);
    assert_eq!(fs::read_dir(place.out()).unwrap().count(), 1);
}

#[test]
fn refuses_senseless_sizes() {
    let place = Place::trained();
    for option in ["--hidden", "--seq-len", "--batch", "--steps", "--save-every"] {
        place.refuses(&[option, "0"], &[option, "0 is out of range", "give 1 to"]);
    }
    place.refuses(&["--batch", "-3"], &["--batch -3 is out of range", "give 1 to"]);
    place.refuses(&["--sample", "-1"], &["--sample -1 is out of range", "give 0 to"]);
    for value in ["0", "-0.5", "NaN", "1e38"] {
        place.refuses(&["--lr", value], &["--lr", "out of range", "above 0"]);
    }
    place.refuses(&["--temperature", "0"], &["--temperature", "out of range", "above 0"]);
}

#[test]
fn refuses_sizes_that_do_not_fit() {
    let place = Place::trained();
    place.refuses(&["--hidden", "1000000000"], &["--hidden 1000000000", "out of range"]);
    place.refuses(
        &["--batch", "1000000", "--seq-len", "1000000"],
        &["too short", "--batch 1000000"],
    );
    // 3 · 65536 · 65600 weights, about twelve times over, need 577 GiB. Some machines have more.
    if available_gib() < 570 {
        place.refuses(&["--hidden", "65536"], &["MiB of memory", "lower --hidden"]);
    }
}

#[test]
fn refuses_unknown_devices() {
    let place = Place::trained();
    for name in ["gpu", "cuda:x", ""] {
        place.refuses(&["--device", name], &["--device", "is unknown", "cuda:N"]);
    }
    if tch_extension::testing::devices().len() > 1 {
        place.refuses(&["--device", "cuda:99"], &["cuda:99 does not exist", "cuda:0"]);
    } else {
        place.refuses(&["--device", "cuda"], &["sees no CUDA device", "--device cpu"]);
    }
}

#[test]
fn usage_errors_exit_with_2() {
    let place = Place::trained();
    let before = place.results();
    for (arguments, expected) in [
        (["--op", "quick"], "--op \"quick\" is unknown"),
        (["--hidden", "many"], "--hidden \"many\" is no whole number"),
        (["--stesp", "1"], "no option --stesp; did you mean --steps?"),
    ] {
        let done = place.run(&arguments);
        let said = text(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{said}");
        assert!(said.starts_with("error: ") && said.lines().count() == 1, "{said}");
        assert!(said.contains(expected) && said.contains("--help"), "{said}");
        assert!(done.stdout.is_empty());
    }
    assert_eq!(place.results(), before);
}

#[test]
fn refuses_a_value_that_is_not_utf8() {
    use std::os::unix::ffi::OsStrExt;
    let done = Place::new().command(&["--device"]).arg(OsStr::from_bytes(b"c\xff")).output();
    let done = done.unwrap();
    assert_eq!(done.status.code(), Some(2));
    assert!(text(&done.stderr).contains("--device \"c\\xFF\" is not UTF-8"));
}

// Bad input: a resume file of another model

#[test]
fn refuses_weights_of_another_model() {
    let place = Place::trained();
    let weights = place.weights("fused");
    let resume = ["--resume", str(&weights)];
    let with = |more: [&'static str; 2]| [resume, more].concat();
    place.refuses(&with(["--hidden", "17"]), &["hidden size is 16, not 17", "--hidden 16"]);
    place.refuses(&with(["--op", "lstm"]), &["is of --op lltm, not lstm", "give --op lltm"]);
    let other = Place::new();
    succeeded(&other.run(&["--op", "gru", "--steps", "1"]));
    let weights = other.weights("gru");
    for (op, name) in [("lstm", "lstm"), ("sequence", "lltm")] {
        let arguments = ["--op", op, "--resume", str(&weights)];
        let expected = format!("is of --op gru, not {name}");
        place.refuses(&arguments, &["cannot resume from", &expected, "give --op gru"]);
    }

    let more = place.write("more.txt", format!("{}é", sample_text()));
    let fewer = place.write("fewer.txt", sample_text().replace('z', "y"));
    for (file, expected) in [(more, "'é' is in the text only"), (fewer, "'z' is in the file only")]
    {
        let arguments = [resume, ["--text", str(&file)]].concat();
        place.refuses(
            &arguments,
            &["cannot resume from", "vocabulary", expected, "leave out --resume"],
        );
    }
}

#[test]
fn refuses_weights_that_do_not_hold_the_model() {
    let place = Place::trained();
    let cases: [(Change, &[&str]); 7] = [
        (&|all| drop(all.remove("output.bias")), &["no tensor \"output.bias\""]),
        (&|all| drop(all.remove("vocabulary")), &["no tensor \"vocabulary\""]),
        (
            &|all| drop(all.insert("second".into(), Tensor::from(1.0))),
            &["tensor \"second\"", "lacks"],
        ),
        (
            &|all| replace(all, "lltm.weights", |old| old.narrow(1, 1, 4).contiguous()),
            &["[48, 4]", "[48, 80]"],
        ),
        (
            &|all| replace(all, "output.weight", |old| old.to_kind(Kind::Double)),
            &["Double", "Float"],
        ),
        (&|all| replace(all, "output.bias", |old| old * f64::NAN), &["output.bias", "NaN"]),
        (
            &|all| replace(all, "vocabulary", |old| old.to_kind(Kind::Float)),
            &["no list of code points"],
        ),
    ];
    for (change, expected) in cases {
        let mut tensors = place.tensors("fused");
        change(&mut tensors);
        let file = place.path("changed.safetensors");
        Tensor::write_safetensors(&tensors.into_iter().collect::<Vec<_>>(), &file).unwrap();
        let always = ["cannot resume from", "changed.safetensors", "give"];
        place.refuses(&["--resume", str(&file)], &[&always, expected].concat());
    }
}

#[test]
fn refuses_files_that_are_no_weights() {
    let place = Place::trained();
    let whole = fs::read(place.weights("fused")).unwrap();
    let (longer, prose) = ([&whole[..], b"x"].concat(), sample_text());
    let cases: [&[u8]; 5] =
        [&whole[..whole.len() - 1], &whole[..100], b"", prose.as_bytes(), &longer];
    for content in cases {
        let file = place.write("broken", content);
        let expected = ["broken is not a whole safetensors file", "written by this example"];
        place.refuses(&["--resume", str(&file)], &expected);
    }
    place
        .refuses(&["--resume", str(&place.path("absent"))], &["absent does not exist", "--resume"]);
    place.refuses(&["--resume", str(&place.out())], &["out is not a file", ".safetensors"]);
}
