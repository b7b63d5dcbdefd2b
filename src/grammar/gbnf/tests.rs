use super::*;

fn lark(text: &str) -> String {
    to_lark(text).unwrap()
}

#[test]
fn a_grammar_is_known_by_its_first_rule() {
    for yes in ["root ::= \"a\"", "# a comment\n\n  root ::=\n \"a\"", "root\n  ::= \"a\"", "my-rule_1::=\"a\""] {
        assert!(is_gbnf(yes), "{yes:?}");
    }
    for no in ["start: \"::=\"", "", "%llguidance {}\nstart: /a/", "// x\nstart: A", "# only a comment"] {
        assert!(!is_gbnf(no), "{no:?}");
    }
}

#[test]
fn what_is_regular_becomes_one_terminal() {
    // By hand: root is rule 0, and used rules are numbered as they are met.
    assert_eq!(
        lark("root ::= \"a\" [b-d]* (x | \"\\n\\x41\"){2,3} .\nx ::= [^\\]\"-]+ # until here\n"),
        "start: T0\n\
         T0: \"a\" ( /[\\u{62}-\\u{64}]/ )* ( ( T1 | \"\\nA\" ) ){2,3} /(.|\\n)/\n\
         T1: ( /[^\\u{5D}-\\u{5D}\\u{22}-\\u{22}\\u{2D}-\\u{2D}]/ )+\n"
    );
}

#[test]
fn what_leads_back_to_itself_stays_a_rule_of_terminals() {
    assert_eq!(
        lark("root ::= item\nitem ::= \"[\" ws (item (\",\" ws item)*)? \"]\" ws\nws ::= \" \"*"),
        "start: r0\n\
         r0: r1\n\
         r1: T3 ( r1 ( T4 r1 )* )? T5\n\
         T2: ( \" \" )*\n\
         T4: \",\" T2\n\
         T3: \"[\" T2\n\
         T5: \"]\" T2\n"
    );
}

#[test]
fn tokens_stay_tokens() {
    assert_eq!(
        lark("root ::= <think> [a]+ <[12]>"),
        "start: r0\nr0: <think> T1 <[12]>\nT1: ( /[\\u{61}-\\u{61}]/ )+\n"
    );
}

#[test]
fn lines_go_on_inside_of_parentheses_and_at_bars() {
    let split = "root ::=\n  \"a\" |\n  \"b\"\n  | ( \"c\"\n # inside\n \"d\" )\nx ::= \"e\"\n";
    assert_eq!(lark(split), lark("root ::= \"a\" | \"b\" | (\"c\" \"d\")\r\nx::=\"e\""));
}

#[test]
fn what_is_wrong_is_named_with_its_line() {
    for (text, line, words) in [
        ("root ::= \"a\" x", 1, "there is no rule called x"),
        ("\n\nx ::= \"a\"", 1, "no rule called root"),
        ("root ::= \"a\"\nroot ::= \"b\"", 2, "twice"),
        ("root ::= \"a", 1, "a text is not closed"),
        ("root ::= \"a\"\n\"b\"", 2, "a rule begins with its name"),
        ("root ::= [a", 1, "a class is not closed"),
        ("root ::= []", 1, "matches nothing"),
        ("root ::= [z-a]", 1, "backwards"),
        ("root ::= (\"a\"", 1, "not closed"),
        ("root ::= \"a\")", 1, "')' begins nothing"),
        ("root ::= \"\\q\"", 1, "\\q is no escape"),
        ("root ::= \"\\x4\"", 1, "2 hex digits"),
        ("root ::= \"\\uD800\"", 1, "is no character"),
        ("root ::= \"a\"{3,2}", 1, "{3,2} is not"),
        ("root ::= \"a\"{x}", 1, "{x} is not"),
        ("root ::= !<think>", 1, "not supported"),
        ("root := \"a\"", 1, "comes ::="),
        ("root ::= \"a\" *x", 1, "no rule called x"),
    ] {
        let error = to_lark(text).unwrap_err();
        assert!(error.line == line && error.what.contains(words), "{text:?}: {error}");
    }
    assert!(to_lark(&format!("root ::= {}", "(".repeat(10_000))).unwrap_err().what.contains("parentheses"));
    // Deep enough to overflow the stack of whoever takes it apart again.
    assert!(to_lark(&format!("root ::= \"a\"{}", "*".repeat(1_000_000))).unwrap_err().what.contains("repetitions"));
    assert!(to_lark("root ::= \"a\"{999999999}").unwrap_err().what.contains("up to"));
}
