//! Tests of arguments: every type in a schema, defaults, names, and arguments that are refused.

use super::*;
use tch_extension::library::{Args, NONE, Value};

#[test]
fn tensors_lists_of_them_and_none() {
    let (x, y) = (doubles(&[1.0, 2.0]), doubles(&[10.0]));
    let op = operator("tensors");
    let text: String = op.call(args![&x, &y, &[&x, &y], &[Some(&x), None]]).unwrap();
    assert_eq!(text, "T3 T10 [T3 T10 ] [T3 None ]");
    let owned = vec![Some(x.shallow_clone()), None];
    let no_tensor: Option<&Tensor> = None;
    let text: String = op.call(args![&x, no_tensor, vec![&y], &owned]).unwrap();
    assert_eq!(text, "T3 None [T10 ] [T3 None ]");
    let empty: &[Tensor] = &[];
    let text: String = op.call(args![&x, NONE, empty, [&y, &y]]).unwrap();
    assert_eq!(text, "T3 None [] [T10 T10 ]");
    // A temporary tensor lives as long as the call.
    let text: String = op
        .call(args![&(&x + 1.0), Some(&y), &[x.shallow_clone(), y.shallow_clone()], [no_tensor]])
        .unwrap();
    assert_eq!(text, "T5 T10 [T3 T10 ] [None ]");
}

#[test]
fn numbers_and_lists_of_them() {
    let op = operator("numbers");
    let text: String = op
        .call(args![
            -1,
            2_i64,
            0.5,
            true,
            1.5,
            &[1, 2],
            vec![3_i64, 4],
            7,
            [0.5, 1.5],
            [true, false]
        ])
        .unwrap();
    assert_eq!(text, "-1 2 0.5 1 1.5 [1 2 ] [3 4 ] [7 7 ] [0.5 1.5 ] [1 0 ]");
    // An int is accepted as a float, any number as a Scalar, a list as int[2], and lists by
    // reference.
    let (ints, floats) = (vec![8_i64, 9], [0.25]);
    let text: String = op
        .call(args![
            i64::MAX,
            i64::MIN,
            3,
            false,
            4,
            &ints,
            &ints[1..],
            &ints,
            &floats,
            [false, true]
        ])
        .unwrap();
    assert_eq!(text, format!("{} {} 3 0 4 [8 9 ] [9 ] [8 9 ] [0.25 ] [0 1 ]", i64::MAX, i64::MIN));
    let nothing: [i64; 0] = [];
    let text: String =
        op.call(args![0, 0, 1e-3_f32, true, true, nothing, nothing, 1, [2], [true, true]]).unwrap();
    assert_eq!(text, "0 0 0.001 1 true [] [] [1 1 ] [2 ] [1 1 ]");
}

#[test]
fn texts_devices_kinds_layouts_and_formats() {
    let op = operator("others");
    let text: String = op
        .call(args![
            "text",
            ["a", "bc"],
            Device::Cuda(1),
            Kind::BFloat16,
            Layout::SparseCsr,
            MemoryFormat::ChannelsLast
        ])
        .unwrap();
    assert_eq!(text, "text [a bc ] cuda:1 BFloat16 SparseCsr ChannelsLast");
    let (word, no_words): (String, Vec<&str>) = ("ü\0-".to_string(), vec![]);
    let text: String = op
        .call(args![
            &word,
            no_words,
            Device::Cpu,
            Kind::Int,
            Layout::Strided,
            MemoryFormat::Preserve
        ])
        .unwrap();
    assert_eq!(text, "ü\0- [] cpu Int Strided Preserve");
}

#[test]
fn options_given_and_not() {
    let op = operator("options");
    let text: String = op.call(args![]).unwrap();
    assert_eq!(text, "None None None None None None None None None");
    let text: String =
        op.call(args![1, [2, 3], 0.5, "t", 4, Device::Cpu, Kind::Half, false, NONE]).unwrap();
    assert_eq!(text, "1 [2 3 ] 0.5 t 4 cpu Half 0 None");
    let text: String = op.call(args![NONE, b = Some(true), f = Some(2.5), k = NONE]).unwrap();
    assert_eq!(text, "None None 2.5 None None None None 1 None");
}

#[test]
fn defaults_and_names() {
    let op = operator("defaults");
    let text: String = op.call(args![]).unwrap();
    assert_eq!(text, "3 0.25 text [4 5 ] 1");
    let text: String = op.call(args![9, b = false, ints = 6, t = "word"]).unwrap();
    assert_eq!(text, "9 0.25 word [6 6 ] 0");
}

/// The arguments that `numbers` accepts, except for one.
fn numbers_but<'a>(place: usize, wrong: impl Into<Value<'a>>) -> Args<'a> {
    let right: [Value<'a>; 10] = [
        1.into(),
        2.into(),
        0.5.into(),
        true.into(),
        1.5.into(),
        [1].into(),
        [3].into(),
        7.into(),
        [0.5].into(),
        [true, false].into(),
    ];
    let mut wrong = Some(wrong.into());
    right.into_iter().enumerate().fold(Args::new(), |args, (index, value)| {
        args.arg(if index == place { wrong.take().expect("one place") } else { value })
    })
}

#[test]
fn a_wrong_argument_is_named_with_its_type_and_the_schema() {
    let op = operator("numbers");
    let x = doubles(&[1.0]);
    op.call::<String>(numbers_but(0, 1)).unwrap();
    // A long text is shortened, on one line, at the end of a whole character.
    let long = format!("a\n{}", "ü".repeat(100));
    let expected_of_long = format!("s: expected SymInt, got the str 'a {}…'", "ü".repeat(29));
    for (args, expected) in [
        (numbers_but(0, 0.5), "i: expected int, got the float 0.5"),
        (numbers_but(0, &x), "i: expected int, got a Tensor"),
        (numbers_but(0, true), "i: expected int, got the bool true"),
        (numbers_but(0, NONE), "i: expected int, got None"),
        (numbers_but(1, "x"), "s: expected SymInt, got the str 'x'"),
        (numbers_but(1, long.as_str()), expected_of_long.as_str()),
        (numbers_but(2, true), "f: expected float, got the bool true"),
        (numbers_but(3, 1), "b: expected bool, got the int 1"),
        (numbers_but(4, "n"), "n: expected Scalar, got the str 'n'"),
        (numbers_but(5, 3), "ints: expected int[], got the int 3"),
        (numbers_but(5, [0.5]), "ints: expected int[], got a list whose item 0 is the float 0.5"),
        (
            numbers_but(6, [0.5].as_slice()),
            "syms: expected SymInt[], got a list whose item 0 is the float 0.5",
        ),
        (numbers_but(7, Kind::Int), "pair: expected int[], got a Kind"),
        (args![], "i: expected int, got nothing"),
    ] {
        let text = message(op.call::<String>(args));
        let schema = "; the schema is tch_test::numbers(int i, SymInt s, float f,";
        assert!(text.starts_with(&format!("tch_test::numbers: {expected}{schema}")), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
}

#[test]
fn calls_that_fit_no_schema() {
    let op = operator("defaults");
    for (args, expected) in [
        (args![1, 0.5, "t", [1, 2], true], "it takes 4 arguments by position, got 5"),
        (args![nonsense = 1], "it has no argument `nonsense`"),
        (args![1, i = 2], "its argument `i` is given twice"),
        (args![f = 1.0, f = 2.0], "its argument `f` is given twice"),
    ] {
        let text = message(op.call::<String>(args));
        assert!(
            text.contains(expected) && text.contains("the schema is tch_test::defaults(int i=3"),
            "{text}"
        );
    }
    let x = doubles(&[1.0]);
    let text = message(operator("tensors").call::<String>(args![&x, &x, &[Some(&x), None], [&x]]));
    assert!(text.contains("many: expected Tensor[], got a list whose item 1 is None"), "{text}");
    let text = message(operator("others").call::<String>(args![
        "t",
        ["t"],
        Device::Cuda(256),
        Kind::Int,
        Layout::Strided,
        MemoryFormat::Preserve
    ]));
    assert!(text.contains("d: expected Device, got a Device of too high an index"), "{text}");
    let text = message(operator("takes_a_dict").call::<()>(args![1]));
    assert!(
        text.contains(
            "d: expected Dict(str, int), got the int 1, but values of this type cannot be made"
        ),
        "{text}"
    );
}

#[test]
fn what_an_operator_throws_is_an_error() {
    let op = operator("fail");
    for (how, expected) in [
        (0, "tch_test::fail: how must not be 0; the schema is tch_test::fail(int how) -> ()"),
        (1, "tch_test::fail: a runtime error; the schema is tch_test::fail(int how) -> ()"),
        (3, "tch_test::fail: on two lines; the schema is tch_test::fail(int how) -> ()"),
        (
            2,
            "tch_test::fail: a C++ exception of unknown type; the schema is tch_test::fail(int how) -> ()",
        ),
    ] {
        assert_eq!(message(op.call::<()>(args![how])), expected);
    }
}
