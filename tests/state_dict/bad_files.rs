//! Files that are incomplete, corrupt or of another model. None may change a variable.

use super::{assert_names, assert_unchanged, float, model, place, store, values};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tch::{Device, Kind, Tensor};
use tch_extension::nn::state_dict::{StateDictOptions, load, load_tensors, save, save_tensors};

#[test]
fn a_file_that_ends_at_any_byte_is_refused() {
    let (_folder, file) = place();
    save(&model(), &file, &Default::default()).expect("saved");
    let whole = std::fs::read(&file).expect("bytes");
    let vs = model();
    let before = values(&vs);
    for len in 0..whole.len() {
        std::fs::write(&file, &whole[..len]).expect("written");
        let error = load(&vs, &[&file], &Default::default()).expect_err("too short");
        assert_names(&error, &file, &["expected a complete safetensors file", "save_file"]);
    }
    std::fs::write(&file, [&whole[..], &[0]].concat()).expect("written");
    assert!(load(&vs, &[&file], &Default::default()).is_err(), "a byte too many");
    assert_unchanged(&vs, &before);
    std::fs::write(&file, &whole).expect("written");
    load(&vs, &[&file], &Default::default()).expect("the whole file");
}

/// A changed header is an error, a panic never; only names and metadata could still be right.
#[test]
fn a_changed_header_never_panics_and_loads_all_or_nothing() {
    let (_folder, file) = place();
    save(&model(), &file, &Default::default()).expect("saved");
    let whole = std::fs::read(&file).expect("bytes");
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().expect("eight")) as usize;
    let vs = model();
    let (mut before, mut refused) = (values(&vs), 0);
    for place in 0..header {
        for change in [0x01, 0x10, 0xff_u8] {
            let mut bytes = whole.clone();
            bytes[place] ^= change;
            std::fs::write(&file, &bytes).expect("written");
            let attempt = AssertUnwindSafe(|| load(&vs, &[&file], &Default::default()));
            match catch_unwind(attempt).expect("no panic") {
                Ok(_) => before = values(&vs),
                Err(error) => {
                    assert!(!error.to_string().contains('\n'), "{error:?}");
                    refused += 1;
                }
            }
            assert_unchanged(&vs, &before);
        }
    }
    assert!(refused > 2 * header, "{refused} of {} changes", 3 * header);
}

#[test]
fn headers_that_lie_are_refused() {
    let (_folder, file) = place();
    let vs = store(Device::Cpu, &[("w", float(&[2, 2]))]);
    let before = values(&vs);
    let write = |header: &str, data: &[u8]| {
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat();
        std::fs::write(&file, bytes).expect("written");
    };
    let info = |shape: &str, kind: &str, offsets: &str| {
        format!(r#"{{"w":{{"dtype":"{kind}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    for (header, data) in [
        (info("[2,2]", "F32", "[0,16]"), 15),
        (info("[2,2]", "F32", "[0,8]"), 8),
        (info("[2,2]", "F32", "[16,0]"), 16),
        (info("[2,2]", "F32", "[0,18446744073709551615]"), 16),
        (info("[9223372036854775807,9223372036854775807]", "F32", "[0,16]"), 16),
        (info("[18446744073709551615,0]", "F32", "[0,0]"), 0),
        (info("[-2,-2]", "F32", "[0,16]"), 16),
        (info("[2,2]", "F99", "[0,16]"), 16),
        (info("[4]", "F32", "[0,16]"), 16),
        (info("[2,2,1]", "F32", "[0,16]"), 16),
        (info("[2,2]", "U32", "[0,16]"), 16),
        (info("[2,2]", "I32", "[0,16]"), 16),
        (String::new(), 0),
        ("[]".to_string(), 0),
        ("{".repeat(1000), 0),
    ] {
        write(&header, &vec![0x3f; data]);
        let error = load(&vs, &[&file], &Default::default()).expect_err(&header);
        assert_names(&error, &file, &[]);
        assert_unchanged(&vs, &before);
    }
    std::fs::write(&file, u64::MAX.to_le_bytes()).expect("written");
    assert!(load(&vs, &[&file], &Default::default()).is_err(), "a header that is too long");
    write(&info("[2,2]", "F32", "[0,16]"), &[0; 16]);
    load(&vs, &[&file], &Default::default()).expect("an honest header");
    assert_eq!(vs.variables()["w"].abs().sum(Kind::Float).double_value(&[]), 0.0);
}

/// The sizes of an empty tensor are multiplied, too: by safetensors, by tch and for the strides.
#[test]
fn sizes_that_overflow_are_refused() {
    let (_folder, file) = place();
    for (shape, kind, end) in [
        ("[0,18446744073709551615]", "F32", "0"),
        ("[18446744073709551615,0]", "F32", "0"),
        ("[0,9223372036854775807,4]", "F32", "0"),
        ("[4611686018427387904,2,0]", "U8", "0"),
        ("[2305843009213693952,0]", "F64", "0"),
        ("[18446744073709551615]", "U8", "18446744073709551615"),
        ("[9223372036854775808]", "U8", "9223372036854775808"),
    ] {
        let header =
            format!(r#"{{"w":{{"dtype":"{kind}","shape":{shape},"data_offsets":[0,{end}]}}}}"#);
        let len = (header.len() as u64).to_le_bytes();
        std::fs::write(&file, [&len[..], header.as_bytes()].concat()).expect("written");
        let attempt = AssertUnwindSafe(|| load_tensors(&file));
        let error = catch_unwind(attempt).expect("no panic").expect_err(shape);
        assert_names(&error, &file, &["expected tensors that fit into the file, got w of shape ["]);
    }
    let header = r#"{"w":{"dtype":"F32","shape":[0,1073741824,2],"data_offsets":[0,0]}}"#;
    let len = (header.len() as u64).to_le_bytes();
    std::fs::write(&file, [&len[..], header.as_bytes()].concat()).expect("written");
    assert_eq!(load_tensors(&file).expect("an empty tensor")["w"].size(), [0, 1 << 30, 2]);
}

/// Names and kinds are a stranger's, so messages escape what they show of them.
#[test]
fn messages_stay_one_line_whatever_a_file_calls_its_tensors() {
    let (_folder, file) = place();
    let vs = store(Device::Cpu, &[("w", float(&[2, 2]))]);
    let other = store(Device::Cpu, &[("a\nb\u{1b}[2J\u{202e}", float(&[1]))]);
    save(&other, &file, &Default::default()).expect("saved");
    let error = load(&vs, &[&file], &Default::default()).expect_err("another name");
    assert_names(&error, &file, &[r"the unexpected a\nb\u{1b}[2J\u{202e}"]);
    let name = |_: &str| "a\nb\u{1b}[2J\u{202e}".to_string();
    let options = StateDictOptions { name: Some(&name), ..Default::default() };
    let error = load(&vs, &[&file], &options).expect_err("another shape");
    assert_names(&error, &file, &[r"a\nb\u{1b}[2J\u{202e} of shape [1]"]);
    let error = load(&vs, &[&file, &file], &options).expect_err("twice");
    assert_names(&error, &file, &[r"no other file has, got a\nb"]);
}

#[test]
fn an_unknown_kind_is_named() {
    let (_folder, file) = place();
    let vs = store(Device::Cpu, &[("w", float(&[2, 2]))]);
    for (written, shown) in
        [("F8_E4M3", "got one of kind F8_E4M3"), ("F4\\n", r"got one of kind F4\\n")]
    {
        for space in ["", " "] {
            let header = format!(
                r#"{{"dtype":{{"dtype":{space}"F32","shape":[1],"data_offsets":[0,4]}},
                   "w":{{"shape":[4],"dtype"{space}:{space}"{written}","data_offsets":[4,8]}}}}"#
            );
            let len = (header.len() as u64).to_le_bytes();
            std::fs::write(&file, [&len[..], header.as_bytes(), &[0; 8]].concat())
                .expect("written");
            let error = load(&vs, &[&file], &Default::default()).expect_err("an unknown kind");
            assert_names(&error, &file, &["expected tensors of the kinds BOOL, U8", shown]);
        }
    }
}

/// libtorch refuses to write to such a variable, so nothing before it may have been written.
#[test]
fn a_variable_whose_elements_share_memory_is_refused_before_the_first_copy() {
    let (_folder, file) = place();
    let model = |last: Tensor| {
        let vs = store(Device::Cpu, &[("a", float(&[3]))]);
        let _ = vs.root().add("z", last, false);
        vs
    };
    save(&model(float(&[2, 3])), &file, &Default::default()).expect("saved");
    let vs = model(float(&[3]).expand([2, 3], false));
    let before = values(&vs);
    let error = load(&vs, &[&file], &Default::default()).expect_err("shared elements");
    assert_names(&error, &file, &["z for a variable of strides [0, 1], which share memory"]);
    assert_unchanged(&vs, &before);
    // One row repeats nothing.
    let vs = model(float(&[3]).expand([2, 3], false).narrow(0, 0, 1));
    save(&model(float(&[1, 3])), &file, &Default::default()).expect("saved");
    load(&vs, &[&file], &Default::default()).expect("one row");
}

/// One wrong tensor, whichever it is, keeps all others from being loaded. The message has all.
#[test]
fn one_wrong_tensor_keeps_the_others_from_being_loaded() {
    let (_folder, file) = place();
    let right =
        || vec![("a", float(&[2, 3])), ("b", float(&[4])), ("c", Tensor::from_slice(&[1_i64]))];
    for wrong in 0..3 {
        for tensor in [float(&[5]), Tensor::zeros([4], (Kind::Int, Device::Cpu))] {
            let mut tensors = right();
            tensors[wrong].1 = tensor;
            save(&store(Device::Cpu, &tensors), &file, &Default::default()).expect("saved");
            let vs = store(Device::Cpu, &right());
            let before = values(&vs);
            let error = load(&vs, &[&file], &Default::default()).expect_err("does not fit");
            let texts =
                [&format!("{} of ", tensors[wrong].0)[..], "instead of", "nothing was loaded"];
            assert_names(&error, &file, &texts);
            assert_unchanged(&vs, &before);
        }
    }
    let tensors = [("a", float(&[1])), ("b", float(&[4]).gt(0.0)), ("c", float(&[1]))];
    save(&store(Device::Cpu, &tensors), &file, &Default::default()).expect("saved");
    let vs = store(Device::Cpu, &right());
    let error = load(&vs, &[&file], &Default::default()).expect_err("nothing fits");
    let texts = [
        "a of shape [1] instead of [2, 3]",
        "b of kind BOOL instead of Float",
        "c of kind F32 instead of Int64",
    ];
    assert_names(&error, &file, &texts);
}

#[test]
fn a_missing_file_or_a_folder_is_named() {
    let (folder, file) = place();
    let vs = model();
    let error = load(&vs, &[&file], &Default::default()).expect_err("no file");
    assert_names(&error, &file, &["state_dict::load", "No such file"]);
    let folder = folder.path().to_path_buf();
    assert_names(&load(&vs, &[&folder], &Default::default()).expect_err("a folder"), &folder, &[]);
}

/// A file that no reader accepts may not replace a good one.
#[test]
fn what_could_not_be_read_back_is_not_written() {
    let (folder, file) = place();
    let good = BTreeMap::from([("w".to_string(), float(&[2]))]);
    save_tensors(&good, &file).expect("saved");
    let names = [("w".repeat(100_000_000), float(&[2]))];
    let one = Tensor::from_slice(&[1.0]);
    // So large a tensor has no memory, and the sizes of three overflow.
    let expanded = |size: i64| one.expand([size], false);
    let named = |name: &str, size: i64| (name.to_string(), expanded(size));
    let uncountable = [named("w", 1 << 61)];
    let too_large = [named("w", 1 << 45)];
    let together = [named("a", 1 << 59), named("b", 1 << 59), named("c", 1 << 59)];
    for (tensors, says) in [
        (&names[..], "names and shapes of at most 100000000 bytes, got 1000000"),
        (&uncountable, "w: expected a tensor whose bytes can be counted, got shape [23058430092"),
        (&too_large, "memory"),
        (&together, "expected tensors that fit into a file"),
    ] {
        let tensors = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
        let tensors = tensors.collect::<BTreeMap<_, _>>();
        let attempt = AssertUnwindSafe(|| save_tensors(&tensors, &file));
        let error = catch_unwind(attempt).expect("no panic").expect_err(says).to_string();
        assert!(error.contains(says) && error.contains("save_tensors"), "{error}");
        assert_eq!(load_tensors(&file).expect("the good file"), good);
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing is left");
}
